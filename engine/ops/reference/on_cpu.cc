// The way there and back alone: needs no GPU.
#include "engine/ops/reference/environment.h"

namespace mbridge::test {
namespace {

const testing::Environment* const g_environment = testing::AddGlobalTestEnvironment(new ReferenceEnvironment(DeviceType::kCpu));

}  // namespace
}  // namespace mbridge::test
