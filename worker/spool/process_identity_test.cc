#include "worker/spool/process_identity.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace mbridge::spool {
namespace {

// A child that runs `body` and then sleeps; killed and reaped at the end.
template <class Body> pid_t Fork(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    body();
    while (true) ::pause();
  }
  return pid;
}

void Reap(pid_t pid) {
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

bool EventuallyDead(const ProcessIdentity& process) {
  for (int i = 0; i < 500; ++i) {
    if (!IsAlive(process)) return true;
    ::usleep(10'000);
  }
  return false;
}

TEST(ProcessIdentity, TellsTheProcessFromOneThatReusesItsPid) {
  const auto self = IdentityOf(::getpid());
  ASSERT_TRUE(self.ok()) << self.status();
  EXPECT_GT(self->start_ticks, 0u);
  EXPECT_TRUE(IsAlive(*self));

  ProcessIdentity reused = *self;
  reused.start_ticks -= 1;
  EXPECT_FALSE(IsAlive(reused));
  EXPECT_TRUE(absl::IsNotFound(SignalProcess(reused, 0)));

  ProcessIdentity other_boot = *self;
  other_boot.boot_id = "another";
  EXPECT_FALSE(IsAlive(other_boot));
  EXPECT_TRUE(absl::IsNotFound(SignalProcess(other_boot, 0)));
  EXPECT_FALSE(IsAlive({}));
}

TEST(ProcessIdentity, AZombieIsDead) {
  const pid_t child = Fork([] { ::_exit(0); });
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  const auto identity = IdentityOf(child);
  ASSERT_TRUE(identity.ok());
  EXPECT_FALSE(IsAlive(*identity));
  Reap(child);
  EXPECT_TRUE(absl::IsNotFound(IdentityOf(child).status()));
}

TEST(ProcessIdentity, SignalsThroughAPidfd) {
  const pid_t child = Fork([] {});
  const auto identity = IdentityOf(child);
  ASSERT_TRUE(identity.ok());
  ASSERT_TRUE(SignalProcess(*identity, SIGTERM).ok());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
  EXPECT_TRUE(absl::IsNotFound(SignalProcess(*identity, SIGTERM)));
}

TEST(ProcessIdentity, KillSessionSparesItsLeaderAndOtherSessions) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t leader = Fork([&] {
    ::setsid();
    const pid_t member = Fork([] {});
    if (::write(ready[1], &member, sizeof(member)) < 0) ::_exit(1);
    ::waitpid(member, nullptr, 0);
  });
  pid_t member = 0;
  ASSERT_EQ(::read(ready[0], &member, sizeof(member)), static_cast<ssize_t>(sizeof(member)));
  const auto leader_identity = IdentityOf(leader);
  const auto member_identity = IdentityOf(member);
  ASSERT_TRUE(leader_identity.ok() && member_identity.ok());

  ProcessIdentity reused = *leader_identity;
  reused.start_ticks -= 1;
  EXPECT_EQ(KillSession(reused), 0);
  EXPECT_TRUE(IsAlive(*member_identity));
  EXPECT_EQ(KillSession(*leader_identity), 1);
  EXPECT_TRUE(EventuallyDead(*member_identity));
  EXPECT_TRUE(IsAlive(*leader_identity));
  Reap(leader);
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace mbridge::spool
