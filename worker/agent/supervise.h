// The agent's main loop.
#pragma once

#include <atomic>

#include "worker/agent/agent.h"
#include "worker/agent/coordinator_link.h"

namespace mbridge::agent {

// Supervises and syncs until a shutdown is over or `stop` is set. `stop` leaves the ranks running for the next agent, but
// for PID 1 of a container, whose end would kill them: there it is a shutdown.
void Supervise(Agent* agent, CoordinatorLink* link, const std::atomic<bool>& stop);

}  // namespace mbridge::agent
