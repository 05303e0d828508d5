// Data-parallel traffic of the parameter buffers by buckets: stretches of equal length, of which with a sharded optimizer each
// rank owns an equal part. Gradients are reduced from the buffer's end to its begin, the order in which backward finishes them;
// updated values are gathered from the begin on, the order in which forward reads them. With overlap the traffic goes on a side
// stream and a communicator of its own, while the model computes; the numbers are those without overlap.
//
// Every rank calls the same methods in the same order, from one thread. Collectives throw EngineError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/core/parameter.h"
#include "engine/core/pass_observer.h"
#include "engine/core/side_stream.h"

namespace mbridge {

class Device;

struct BucketOptions {
  int64_t elements = 0;         // ddp.bucket_size, rounded up to whole blocks of all ranks; 0: max(40e6, 1e6 * ranks).
  bool overlap_reduce = false;  // ddp.overlap_grad_reduce
  bool overlap_gather = false;  // ddp.overlap_param_gather; only where the optimizer is sharded.
};

class BucketExchange : public PassObserver {
 public:
  // Elements. Parts of ranks begin at multiples of it, sums of the optimizer end there.
  static constexpr int64_t kBlock = 16384;
  // Elements of a bucket.
  static int64_t BucketElements(const BucketOptions& options, int ranks);

  // `store` is allocated; where a rank owns parts of buckets on CUDA it has `ranks * kBlock` spare elements. Store and
  // communicator outlive this object. One rank: nothing to exchange, one bucket.
  BucketExchange(ParameterStore* store, const BucketOptions& options, bool sharded, Communicator* data_parallel,
                 const Context& context);
  ~BucketExchange() override;
  BucketExchange(const BucketExchange&) = delete;
  BucketExchange& operator=(const BucketExchange&) = delete;

  struct Range {
    int64_t begin = 0, end = 0;
  };
  int count() const { return static_cast<int>(buckets_.size()); }
  Range bucket(int index) const { return buckets_[static_cast<size_t>(index)]; }
  // What this rank updates of a bucket: all of it where nothing is sharded. May be empty.
  Range own(int index) const;

  // From now on gradients that GradientsAdded names are final: reductions begin where overlap_reduce says so.
  void BeginLastBackward();
  void GradientsAdded(int first) override;
  // The context's stream goes on with gradients that are the mean over the ranks: in the whole buffer, or in this
  // rank's own parts. Starts what has not begun.
  void FinishReduction();

  // Bucket by bucket in ascending order, after this rank's part was updated; sharded only.
  void StartGather(int index);
  // Forward waits for the buckets that hold the parameters below `end`.
  void BeforeUse(int end) override;
  void FinishGather() { JoinGathers(count()); }

  bool overlap_gather() const { return overlap_gather_; }
  // For the log: empty for one rank.
  std::string Describe() const;
  // For the log, where ddp.bucket_size makes very many buckets of `elements`, each with the start-up time of its collectives;
  // else empty.
  static std::string WarnOfManyBuckets(int64_t elements, const BucketOptions& options, int ranks);
  std::string Warning() const { return WarnOfManyBuckets(store_->values().size(), options_, ranks_); }

 private:
  void PlanBuckets();
  int64_t PartLength(int index) const;
  void StartReductions(int64_t from);
  void Reduce(int index);
  void Gather(int index);
  void ReduceThroughStaging(int index);
  void GatherThroughStaging(int index);
  void JoinGathers(int end);
  // Elements of part `rank` of a bucket that the buffer holds, from `offset` on, at most `most`.
  int64_t Present(int index, int rank, int64_t offset, int64_t most) const;

  ParameterStore* store_;
  const BucketOptions options_;
  Communicator* data_parallel_;
  const Context context_;
  Device& device_;
  const int ranks_;
  const bool sharded_, in_place_, overlap_reduce_, overlap_gather_;
  std::vector<Range> buckets_;
  std::vector<int64_t>
      begins_;  // Of parameters in the buffer, by their places in the store; of the rest the end of those before.
  std::unique_ptr<SideStream> side_;
  std::unique_ptr<Communicator> twin_;  // Null without overlap.
  Communicator* group_;                 // Where the traffic goes.
  std::shared_ptr<void> staging_;       // Of the side stream.
  bool last_backward_ = false;
  int next_reduction_ = 0;  // Counts down; buckets from here on have been started.
  int gathers_started_ = 0, gathers_joined_ = 0;
};

}  // namespace mbridge
