// The wall clock as records carry it. Only for people and for ordering; timeouts use the steady clock.
#pragma once

#include <google/protobuf/timestamp.pb.h>

namespace mbridge::spool {

google::protobuf::Timestamp NowTimestamp();

}  // namespace mbridge::spool
