#include "server/metrics/service_metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>

#include "proto/rpc/status_details.h"

namespace mbridge::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::MetricPoint Point(double loss) {
  v1::MetricPoint point;
  point.set_kind(v1::METRIC_KIND_TRAIN);
  point.set_step(7);
  point.set_lm_loss(loss);
  return point;
}

TEST(ServiceMetrics, TheLossOfADeadJobIsNotScraped) {
  ServiceMetrics metrics("0.1", "abc");
  metrics.TrainPoint("j-1", Point(2.5));
  metrics.TrainPoint("j-2", Point(3.5));
  EXPECT_THAT(metrics.Text(), HasSubstr("mb_train_loss{job=\"j-1\"} 2.5"));
  metrics.RemoveJob("j-1");
  EXPECT_THAT(metrics.Text(), Not(HasSubstr("j-1")));
  EXPECT_THAT(metrics.Text(), HasSubstr("mb_train_loss{job=\"j-2\"} 3.5"));
}

TEST(ServiceMetrics, NaNStaysNaN) {
  ServiceMetrics metrics("0.1", "abc");
  metrics.TrainPoint("j-1", Point(NAN));
  EXPECT_THAT(metrics.Text(), HasSubstr("mb_train_loss{job=\"j-1\"} Nan"));
}

TEST(ServiceMetrics, SeriesOfJobsAreBounded) {
  ServiceMetrics metrics("0.1", "abc");
  for (int i = 0; i < kMaxTrainedJobs + 50; ++i) metrics.TrainPoint("j-" + std::to_string(1000 + i), Point(1));
  EXPECT_THAT(metrics.Text(), HasSubstr("j-1199"));
  EXPECT_THAT(metrics.Text(), Not(HasSubstr("j-1200")));
}

TEST(ServiceMetrics, JobsByStateAndReason) {
  ServiceMetrics metrics("0.1", "abc");
  metrics.SetLiveJobs({{{v1::JOB_STATE_RUNNING, v1::JOB_KIND_PRETRAIN}, 3}});
  metrics.JobFinished(v1::JOB_KIND_PRETRAIN, v1::JOB_STATE_FAILED, v1::REASON_NAN_LOSS);
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("mb_jobs{kind=\"pretrain\",state=\"running\"} 3"));
  EXPECT_THAT(text, HasSubstr("mb_jobs{kind=\"pretrain\",state=\"queued\"} 0"));
  EXPECT_THAT(text, HasSubstr("reason=\"nan_loss\""));
  EXPECT_THAT(text, HasSubstr("mb_build_info{commit=\"abc\",version=\"0.1\"} 1"));
}

TEST(ServiceMetrics, APortInUseNamesTheAddressAndTheNextStep) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ServiceMetrics metrics("0.1", "abc");
  const absl::Status status = metrics.Serve("127.0.0.1:" + std::to_string(ntohs(address.sin_port)));
  EXPECT_EQ(ReasonOf(status), v1::REASON_PORT_IN_USE);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--metrics-listen"));
  close(fd);
}

}  // namespace
}  // namespace mbridge::server
