#include <iostream>

#include "client/mbctl/app.h"
#include "client/mbctl/session.h"

int main(int argc, char** argv) {
  using namespace mbridge;
  mbctl::Session session(std::cout, std::cerr, mbctl::ProcessTerminal(), client::ProcessEnvironment);
  return mbctl::RunCommandLine(&session, {argv + 1, argv + argc});
}
