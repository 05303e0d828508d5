// `mbrank convert import|export|verify|inspect|recipe`: conversions from the command line, and as the work of a job.
#pragma once

#include <memory>

#include "mbridge/v1/rank.pb.h"
#include "worker/rank/spool_sink.h"

namespace CLI {
class App;
}

namespace mbridge {

class ConvertCommand {
 public:
  explicit ConvertCommand(CLI::App* app);
  ~ConvertCommand();
  // The parsed subcommand. Exit codes of the reasons; 1 when verify finds a difference.
  int Run();

 private:
  struct Flags;
  std::unique_ptr<Flags> flags_;
  CLI::App* import_ = nullptr;
  CLI::App* export_ = nullptr;
  CLI::App* verify_ = nullptr;
  CLI::App* inspect_ = nullptr;
  CLI::App* recipe_ = nullptr;
};

// The conversion of a job (spec.convert), reported to the sink. Throws EngineError.
v1::RankResult RunConversion(const v1::RankSpec& spec, EventSink* sink, const std::atomic<bool>* stop);

// What is wrong with it before it starts, and what it would do.
void CheckConversion(const v1::RankSpec& spec, v1::PreflightResult* result);

}  // namespace mbridge
