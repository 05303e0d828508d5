// The console and log lines of a training run in Megatron-LM's format (megatron/training/training.py, training_log and
// evaluate_and_print_results), with two fields more: tokens/s and ETA. The rank's log and mbctl print the same lines.
// Pure functions of a point; thread-safe.
#pragma once

#include <string>

namespace mbridge::v1 {
class MetricPoint;
}

namespace mbridge {

struct TrainingLineOptions {
  bool utc = false;           // Time stamp in UTC instead of local time.
  bool throughput = false;    // "throughput per GPU (TFLOP/s/GPU)", Megatron-LM's --log-throughput.
  bool speed_and_eta = true;  // The fields that Megatron-LM does not have.
};

// One line without line feed, leading blank, time stamp in whole seconds:
//   " [YYYY-MM-DD HH:MM:SS] iteration        3/      10 | consumed samples: ... | lm loss: 1.016689E+01 | ... |"
// NaN prints as NaN, infinity as Inf. `num zeros` and `params norm` appear where the point has them.
std::string FormatTrainingLine(const v1::MetricPoint& point, const TrainingLineOptions& options = {});

// Three lines joined by line feeds, without a last one: dashes, text, dashes; PPL = exp(min(20, loss)).
// A TEST point reads "on test set"; a VALIDATION point of the final pass "on validation set".
std::string FormatValidationLines(const v1::MetricPoint& point);

// The right one of the two by the point's kind.
std::string FormatPoint(const v1::MetricPoint& point, const TrainingLineOptions& options = {});

// "42s", "3m05s", "2h07m", "3d04h"; "-" when negative or not a number.
std::string FormatDuration(double seconds);

}  // namespace mbridge
