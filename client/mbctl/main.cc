#include <iostream>

#include "client/mbctl/app.h"
#include "client/mbctl/session.h"

int main(int argc, char** argv) {
  mbridge::mbctl::Session session(std::cout, std::cerr, mbridge::mbctl::ProcessTerminal(), mbridge::client::ProcessEnvironment);
  return mbridge::mbctl::RunCommandLine(&session, {argv + 1, argv + argc});
}
