// The CUDA twins against the double-precision references of the CPU twins' tests.
#include "engine/ops/cuda/test_device.h"
#include "engine/ops/reference/environment.h"

namespace mbridge::test {
namespace {

class CudaEnvironment : public ReferenceEnvironment {
 public:
  CudaEnvironment() : ReferenceEnvironment(DeviceType::kCuda) {}
  void SetUp() override {
    MB_NEEDS_GPU();
    ReferenceEnvironment::SetUp();
    g_on_device = true;
  }
};

const testing::Environment* const g_environment = testing::AddGlobalTestEnvironment(new CudaEnvironment);

}  // namespace
}  // namespace mbridge::test
