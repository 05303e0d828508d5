#include "worker/spool/timestamp.h"

#include <ctime>

namespace mbridge::spool {

google::protobuf::Timestamp NowTimestamp() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  google::protobuf::Timestamp timestamp;
  timestamp.set_seconds(now.tv_sec);
  timestamp.set_nanos(static_cast<int32_t>(now.tv_nsec));
  return timestamp;
}

}  // namespace mbridge::spool
