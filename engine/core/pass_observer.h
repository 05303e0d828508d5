// Told by a model where a pass over its parameters stands, so that data-parallel ranks can exchange them meanwhile.
#pragma once

namespace mbridge {

// Parameters count by their places in the ParameterStore. Calls come from the thread that runs the model, between operators.
class PassObserver {
 public:
  virtual ~PassObserver() = default;
  // Forward is about to read the values of parameters below `end`. Ends never fall within a pass.
  virtual void BeforeUse(int end) = 0;
  // Backward of a microbatch has added all it has to the gradients of the parameters from `first` on.
  virtual void GradientsAdded(int first) = 0;
};

}  // namespace mbridge
