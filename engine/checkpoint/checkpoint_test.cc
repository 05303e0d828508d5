#include "engine/checkpoint/checkpoint.h"

#include <fstream>
#include <limits>
#include <map>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "engine/checkpoint/checkpoint_test_support.h"
#include "engine/core/file.h"

namespace mbridge {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST_F(CheckpointTest, RoundTripKeepsEveryBitAndTheMeta) {
  State saved(1), loaded(50);
  const auto result = SaveCheckpoint(Step(1) + "/", MetaOf(1), saved.tensors(), self_.get());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->path, Step(1));
  EXPECT_EQ(result->tensors, 4);
  const auto meta = LoadCheckpoint(Step(1), {result->manifest_hash}, loaded.tensors(), self_.get());
  ASSERT_TRUE(meta.ok()) << meta.status();
  EXPECT_TRUE(loaded == saved);
  EXPECT_EQ(meta->step, 1);
  EXPECT_EQ(meta->consumed_samples, 32);
  EXPECT_EQ(meta->run_name, "run");
  EXPECT_EQ(meta->attempt, 2);
  EXPECT_EQ(meta->config_text, MetaOf(1).config_text);
  EXPECT_EQ(nlohmann::json::parse(meta->state_json), nlohmann::json::parse(MetaOf(1).state_json));
  EXPECT_TRUE(meta->has_optimizer_state);
  const auto verified = VerifyCheckpoint(Step(1), result->manifest_hash);
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->bytes, result->bytes);
  EXPECT_EQ(verified->tensors, 4);
  EXPECT_EQ(verified->manifest_hash, result->manifest_hash);
  EXPECT_EQ(ReadCheckpointMeta(Step(1)).value().job_id, "job-1");
  EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
}

// What any reader of safetensors relies on.
TEST_F(CheckpointTest, DataFilesAreSafetensors) {
  State saved(1);
  ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), saved.tensors(), self_.get()).ok());
  const std::string content = ReadWholeFile(Step(1) + "/rank_00000.safetensors", 1 << 20).value();
  uint64_t length = 0;
  std::memcpy(&length, content.data(), 8);
  ASSERT_LT(8 + length, content.size());
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(content[8], '{');
  const auto header = nlohmann::json::parse(content.substr(8, length));
  std::map<int64_t, int64_t> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    ranges[entry["data_offsets"][0]] = entry["data_offsets"][1];
  }
  ASSERT_EQ(ranges.size(), 4u);
  int64_t next = 0;
  for (const auto& [begin, end] : ranges) {
    EXPECT_EQ(begin, next);
    next = end;
  }
  EXPECT_EQ(8 + length + static_cast<uint64_t>(next), content.size());
  const auto& entry = header["embedding.weight"];
  EXPECT_EQ(entry["dtype"], "BF16");
  EXPECT_EQ(entry["shape"], (std::vector<int>{12, 8}));
  EXPECT_EQ(std::memcmp(content.data() + 8 + length + entry["data_offsets"][0].get<size_t>(), saved[0].tensor.data,
                        saved[0].tensor.bytes()),
            0);
}

// One rank's share of a tensor split over `ranks` along `axis`, with its own memory.
struct Shard {
  Shard(const std::string& name, const Tensor& whole, int axis, int ranks, int rank) {
    Shape shape = whole.shape;
    shape[axis] /= ranks;
    memory.resize(static_cast<size_t>(shape.NumElements()), -1.0f);
    entry = {name, whole.shape, shape, axis, rank * shape[axis], 0, {memory.data(), DType::kF32, DeviceType::kCpu, shape}, true};
  }
  // The values that belong here, from the whole [rows, columns] tensor.
  std::vector<float> Expected(const Tensor& whole) const {
    std::vector<float> values;
    const Shape& shape = entry.shard_shape;
    for (int64_t row = 0; row < shape[0]; ++row) {
      for (int64_t column = 0; column < shape[1]; ++column) {
        const int64_t r = row + (entry.shard_axis == 0 ? entry.shard_begin : 0),
                      c = column + (entry.shard_axis == 1 ? entry.shard_begin : 0);
        values.push_back(whole.as<float>()[r * whole.shape[1] + c]);
      }
    }
    return values;
  }
  std::vector<float> memory;
  CheckpointTensor entry;
};

TEST_F(CheckpointTest, AnyTensorParallelSizeLoadsAnyOther) {
  std::vector<float> data(12 * 30);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i) * 0.5f;
  const Tensor whole{data.data(), DType::kF32, DeviceType::kCpu, {12, 30}};
  int step = 0;
  for (const int save_axis : {0, 1}) {
    for (const int save_ranks : {2, 3}) {
      ++step;
      OnRanks(save_ranks, [&](Communicator& world) {
        Shard shard("w", whole, save_axis, save_ranks, world.rank());
        shard.memory = shard.Expected(whole);
        shard.entry.tensor.data = shard.memory.data();
        // A replicated tensor is written by rank 0 only.
        std::vector<float> bias = {1, 2, 3};
        const CheckpointTensor replicated{
            "b", {3}, {3}, -1, 0, 0, {bias.data(), DType::kF32, DeviceType::kCpu, {3}}, world.rank() == 0};
        const auto result = SaveCheckpoint(Step(step), MetaOf(step), {shard.entry, replicated}, &world);
        ASSERT_TRUE(result.ok()) << result.status();
        EXPECT_EQ(result->tensors, 2);
        EXPECT_EQ(VerifyCheckpoint(Step(step), result->manifest_hash).value().bytes, result->bytes);
      });
      for (const int load_axis : {0, 1}) {
        for (const int load_ranks : {1, 2, 3, 6}) {
          for (int rank = 0; rank < load_ranks; ++rank) {
            Shard shard("w", whole, load_axis, load_ranks, rank);
            std::vector<float> bias(3);
            const CheckpointTensor replicated{"b", {3}, {3}, -1, 0, 0, {bias.data(), DType::kF32, DeviceType::kCpu, {3}}, true};
            const auto meta = LoadCheckpoint(Step(step), {}, {shard.entry, replicated}, self_.get());
            ASSERT_TRUE(meta.ok()) << meta.status();
            EXPECT_EQ(shard.memory, shard.Expected(whole)) << save_axis << save_ranks << load_axis << load_ranks << rank;
            EXPECT_THAT(bias, ElementsAre(1, 2, 3));
          }
        }
      }
    }
  }
}

TEST_F(CheckpointTest, PiecesOfAShardedOptimizerLoadIntoOtherPieces) {
  std::vector<float> data(6 * 8);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  const auto piece = [](std::vector<float>& memory, int64_t begin) {
    const auto count = static_cast<int64_t>(memory.size());
    return CheckpointTensor{"optimizer.m", {6, 8}, {6, 8}, -1, 0, begin, {memory.data(), DType::kF32, DeviceType::kCpu, {count}},
                            true};
  };
  OnRanks(3, [&](Communicator& world) {
    // The last rank owns nothing.
    const int64_t begin = world.rank() == 0 ? 0 : 19, end = world.rank() == 0 ? 19 : 48;
    std::vector<float> memory(data.begin() + begin, data.begin() + end);
    std::vector<CheckpointTensor> tensors;
    if (world.rank() < 2) tensors.push_back(piece(memory, begin));
    const auto result = SaveCheckpoint(Step(1), MetaOf(1), tensors, &world);
    ASSERT_TRUE(result.ok()) << result.status();
  });
  std::vector<float> middle(20), all(48), columns(6 * 4);
  ASSERT_TRUE(LoadCheckpoint(Step(1), {}, {piece(middle, 10)}, self_.get()).ok());
  EXPECT_EQ(middle, std::vector<float>(data.begin() + 10, data.begin() + 30));
  ASSERT_TRUE(LoadCheckpoint(Step(1), {}, {piece(all, 0)}, self_.get()).ok());
  EXPECT_EQ(all, data);
  const CheckpointTensor right{"optimizer.m", {6, 8}, {6, 4}, 1, 4, 0, {columns.data(), DType::kF32, DeviceType::kCpu, {6, 4}},
                               true};
  ASSERT_TRUE(LoadCheckpoint(Step(1), {}, {right}, self_.get()).ok());
  for (int64_t i = 0; i < 24; ++i) {
    const int64_t element = i / 4 * 8 + 4 + i % 4;
    EXPECT_EQ(columns[static_cast<size_t>(i)], static_cast<float>(element));
  }
}

// Gate and linear half of a gated layer: each rank has a part of both, in pieces that cross the border between them.
TEST_F(CheckpointTest, StripesOfTwoRanksLoadOnOne) {
  const auto spec_of = [](int rank, int ranks) {
    ParameterSpec spec{.name = "fc1", .shape = {12 / ranks, 5}, .global_shape = {12, 5}};
    if (ranks > 1) {
      spec.shard_axis = 0;
      spec.shard_begin = 6 / ranks * rank;
      spec.stripes = {6 / ranks, 6 / ranks};
    }
    return spec;
  };
  const auto place = [](int rank, int64_t row, int64_t column) {  // In the whole tensor, of a row of a rank's shard.
    const int64_t element = (row / 3 * 6 + rank * 3 + row % 3) * 5 + column;
    return static_cast<float>(element);
  };
  OnRanks(2, [&](Communicator& world) {
    std::vector<float> shard;
    for (int64_t row = 0; row < 6; ++row) {
      for (int64_t column = 0; column < 5; ++column) shard.push_back(place(world.rank(), row, column));
    }
    std::vector<CheckpointTensor> tensors;
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 4}, {4, 22}, {22, 30}}) {
      const Tensor piece{shard.data() + begin, DType::kF32, DeviceType::kCpu, {end - begin}};
      AppendCheckpointTensors("optimizer.fc1", spec_of(world.rank(), 2), piece, begin, true, &tensors);
    }
    EXPECT_EQ(tensors.size(), 4u);  // The middle piece touches both stripes.
    const auto saved = SaveCheckpoint(Step(1), MetaOf(1), tensors, &world);
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_TRUE(VerifyCheckpoint(Step(1), saved->manifest_hash).ok());
    std::vector<float> back(30, -1.0f);
    std::vector<CheckpointTensor> own;
    AppendCheckpointTensors("optimizer.fc1", spec_of(world.rank(), 2), {back.data(), DType::kF32, DeviceType::kCpu, {6, 5}}, 0,
                            true, &own);
    EXPECT_EQ(own.size(), 2u);
    ASSERT_TRUE(LoadCheckpoint(Step(1), {}, own, &world).ok());
    EXPECT_EQ(back, shard);
  });
  std::vector<float> whole(60);
  std::vector<CheckpointTensor> tensors;
  AppendCheckpointTensors("optimizer.fc1", spec_of(0, 1), {whole.data(), DType::kF32, DeviceType::kCpu, {12, 5}}, 0, true,
                          &tensors);
  ASSERT_TRUE(LoadCheckpoint(Step(1), {}, tensors, self_.get()).ok());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(whole[i], static_cast<float>(i));
}

TEST_F(CheckpointTest, EveryElementIsWrittenByOneRank) {
  OnRanks(2, [&](Communicator& world) {
    State state(1);
    const auto twice = SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), &world);
    EXPECT_EQ(ReasonOf(twice.status()), v1::REASON_ENGINE_ERROR);
    EXPECT_THAT(Message(twice.status()), HasSubstr("is written twice"));
    state[0].write_here = false;
    for (size_t i = 1; i < 4; ++i) state[i].write_here = world.rank() == 0;
    ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), &world).ok());
    state[0].shard_shape = {6, 8};
    state[0].shard_axis = 0;
    state[0].tensor.shape = {6, 8};
    state[0].write_here = world.rank() == 0;
    const auto half = SaveCheckpoint(Step(2), MetaOf(2), state.tensors(), &world);
    EXPECT_THAT(Message(half.status()), HasSubstr("tensor embedding.weight: no rank writes the elements 48 to 96"));
  });
  EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
}

TEST_F(CheckpointTest, NotFiniteStateIsNeverSaved) {
  State state(1);
  float* moment = state[2].tensor.as<float>();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    moment[95] = bad;
    const auto result = SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get());
    EXPECT_EQ(ReasonOf(result.status()), v1::REASON_NAN_LOSS);
    EXPECT_THAT(Message(result.status()), HasSubstr("optimizer.state.exp_avg.embedding.weight"));
  }
  // Every rank hears of it.
  OnRanks(2, [&](Communicator& world) {
    State other(1);
    for (auto& tensor : other.tensors()) tensor.write_here = world.rank() == 1;
    if (world.rank() == 1) other[1].tensor.as<BFloat16>()[0].bits = 0x7fc0;
    EXPECT_EQ(ReasonOf(SaveCheckpoint(Step(1), MetaOf(1), other.tensors(), &world).status()), v1::REASON_NAN_LOSS);
  });
  EXPECT_THAT(Entries(), IsEmpty());
}

TEST_F(CheckpointTest, AnExistingCheckpointIsNotTouched) {
  State state(1), other(9), loaded(0);
  ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get()).ok());
  const auto again = SaveCheckpoint(Step(1), MetaOf(1), other.tensors(), self_.get());
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(LoadCheckpoint(Step(1), {}, loaded.tensors(), self_.get()).ok());
  EXPECT_TRUE(loaded == state);
  EXPECT_THAT(Entries(), ElementsAre("step_00000001"));
}

TEST_F(CheckpointTest, MismatchesNameTheTensor) {
  State state(1);
  ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get()).ok());
  const auto load = [&](State& into) {
    const absl::Status status = LoadCheckpoint(Step(1), {}, into.tensors(), self_.get()).status();
    EXPECT_EQ(ReasonOf(status), v1::REASON_INVALID_CONFIG);
    return Message(status);
  };
  State shape(0, false);
  shape.Add("optimizer.state.exp_avg.embedding.weight", DType::kF32, {12, 9}, 0);
  EXPECT_THAT(load(shape),
              testing::AllOf(HasSubstr("optimizer.state.exp_avg.embedding.weight"), HasSubstr("[12, 8]"), HasSubstr("[12, 9]")));
  State more(0);
  more.Add("head.weight", DType::kBF16, {2}, 0);
  EXPECT_THAT(load(more), HasSubstr("has no tensor head.weight"));
  State less(0, false);
  EXPECT_THAT(load(less),
              HasSubstr("has a tensor optimizer.state.exp_avg.embedding.weight of shape [12, 8] that this model lacks"));
  State type(0);
  type[1].tensor.dtype = DType::kF16;
  EXPECT_THAT(load(type), HasSubstr("tensor norm.weight is BF16 in the checkpoint and F16 in this model"));
}

TEST_F(CheckpointTest, WeightsOnlyLeavesOptimizerStateAndConverts) {
  State state(1), into(7), before(7);
  ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get()).ok());
  ASSERT_TRUE(LoadCheckpoint(Step(1), {.expected_manifest_hash = "", .weights_only = true}, into.tensors(), self_.get()).ok());
  EXPECT_EQ(std::memcmp(into[0].tensor.data, state[0].tensor.data, state[0].tensor.bytes()), 0);
  EXPECT_EQ(std::memcmp(into[2].tensor.data, before[2].tensor.data, before[2].tensor.bytes()), 0);
  State wide(0, false);
  wide.tensors().clear();
  wide.Add("embedding.weight", DType::kF32, {12, 8}, 0);
  wide.Add("norm.weight", DType::kF32, {7}, 0);
  ASSERT_TRUE(LoadCheckpoint(Step(1), {.expected_manifest_hash = "", .weights_only = true}, wide.tensors(), self_.get()).ok());
  for (int64_t i = 0; i < 96; ++i) EXPECT_EQ(wide[0].tensor.as<float>()[i], ToFloat(state[0].tensor.as<BFloat16>()[i]));
}

TEST_F(CheckpointTest, WithoutOptimizerStateOnlyWeightsLoad) {
  State state(1, false), into(2, false);
  CheckpointMeta meta = MetaOf(1);
  meta.has_optimizer_state = false;
  ASSERT_TRUE(SaveCheckpoint(Step(1), meta, state.tensors(), self_.get()).ok());
  EXPECT_EQ(ReasonOf(LoadCheckpoint(Step(1), {}, into.tensors(), self_.get()).status()), v1::REASON_INVALID_CONFIG);
  EXPECT_TRUE(LoadCheckpoint(Step(1), {.expected_manifest_hash = "", .weights_only = true}, into.tensors(), self_.get()).ok());
  EXPECT_TRUE(into == state);
}

TEST_F(CheckpointTest, ManifestHashVersionAndAbsence) {
  State state(1);
  ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get()).ok());
  EXPECT_EQ(ReasonOf(LoadCheckpoint(Step(1), {"0123456789abcdef"}, state.tensors(), self_.get()).status()),
            v1::REASON_CHECKPOINT_CORRUPT);
  EXPECT_EQ(VerifyCheckpoint(Step(1), "0123456789abcdef").status().code(), absl::StatusCode::kDataLoss);
  const absl::Status absent = VerifyCheckpoint(Step(2)).status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(absent), v1::REASON_CHECKPOINT_NOT_FOUND);
  std::string text = ReadWholeFile(Step(1) + "/manifest.json", 1 << 20).value();
  const size_t at = text.find("\"format_version\": 1");
  ASSERT_NE(at, std::string::npos);
  text[at + 18] = '9';
  ASSERT_TRUE(WriteFileDurably(Step(1) + "/manifest.json", text).ok());
  const absl::Status newer = ReadCheckpointMeta(Step(1)).status();
  EXPECT_EQ(newer.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(newer), HasSubstr("format version 9"));
}

// A manifest that lies about its parts must not make a reader touch memory or files outside.
TEST_F(CheckpointTest, ForgedManifestsAreRefused) {
  State state(1);
  ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get()).ok());
  const auto good = nlohmann::json::parse(ReadWholeFile(Step(1) + "/manifest.json", 1 << 20).value());
  const std::vector<std::function<void(nlohmann::json&)>> forgeries = {
      [](auto& m) { m["tensors"][0]["shards"][0]["offset"] = int64_t{1} << 62; },
      [](auto& m) { m["tensors"][0]["shards"][0]["bytes"] = -8; },
      [](auto& m) { m["tensors"][0]["shards"][0]["begin"] = 5; },
      [](auto& m) { m["tensors"][0]["shards"][0]["elements"] = int64_t{1} << 61; },
      [](auto& m) {
        m["tensors"][0]["shape"] = {-1, 2};
      },
      [](auto& m) { m["tensors"][0]["shape"] = {1, 1, 1, 1, 1, 1, 1}; },
      [](auto& m) { m["tensors"][0]["dtype"] = "F7"; },
      [](auto& m) { m["tensors"][0]["shards"][0]["file"] = "../x"; },
      [](auto& m) { m["files"][0]["name"] = "../x"; },
      [](auto& m) { m["files"][0]["header_bytes"] = int64_t{1} << 40; },
      [](auto& m) { m["tensors"][0]["shards"] = nlohmann::json::array(); },
      [](auto& m) { m.erase("step"); },
      [](auto& m) { m["format"] = "other"; },
      [](auto& m) { m = nlohmann::json::array(); }};
  for (size_t i = 0; i < forgeries.size(); ++i) {
    auto forged = good;
    forgeries[i](forged);
    ASSERT_TRUE(WriteFileDurably(Step(1) + "/manifest.json", forged.dump()).ok());
    EXPECT_EQ(VerifyCheckpoint(Step(1)).status().code(), absl::StatusCode::kDataLoss) << i;
    State into(2);
    EXPECT_FALSE(LoadCheckpoint(Step(1), {}, into.tensors(), self_.get()).ok()) << i;
  }
}

TEST_F(CheckpointTest, EveryFlippedBitIsFound) {
  OnRanks(2, [&](Communicator& world) {
    State state(1);
    for (size_t i = 0; i < 4; ++i) state[i].write_here = static_cast<int>(i % 2) == world.rank();
    ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), &world).ok());
  });
  const std::string hash = VerifyCheckpoint(Step(1)).value().manifest_hash;
  for (const std::string name : {"rank_00000.safetensors", "rank_00001.safetensors", "manifest.json"}) {
    const std::string path = Step(1) + "/" + name;
    const std::string content = ReadWholeFile(path, 1 << 20).value();
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (size_t i = 0; i < content.size(); ++i) {
      file.seekp(static_cast<std::streamoff>(i)).put(static_cast<char>(content[i] ^ (1 << i % 8))).flush();
      const absl::Status status = VerifyCheckpoint(Step(1), hash).status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << name << " byte " << i;
      ASSERT_THAT(Message(status), HasSubstr(name));
      file.seekp(static_cast<std::streamoff>(i)).put(content[i]).flush();
    }
  }
  EXPECT_TRUE(VerifyCheckpoint(Step(1), hash).ok());
}

TEST_F(CheckpointTest, LoadingADamagedShardNamesFileAndTensor) {
  State state(1), into(2);
  const auto save = [&] {
    ASSERT_TRUE(RemoveAll(Step(1)).ok());
    ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get()).ok());
  };
  const std::string path = Step(1) + "/rank_00000.safetensors";
  const auto load = [&] { return LoadCheckpoint(Step(1), {}, into.tensors(), self_.get()).status(); };
  save();
  std::string content = ReadWholeFile(path, 1 << 20).value();
  content.back() ^= 1;  // The last tensor written is norm.weight.
  ASSERT_TRUE(WriteFileDurably(path, content).ok());
  EXPECT_EQ(ReasonOf(load()), v1::REASON_CHECKPOINT_CORRUPT);
  EXPECT_THAT(Message(load()), testing::AllOf(HasSubstr(path), HasSubstr("tensor norm.weight")));
  save();
  std::filesystem::resize_file(path, content.size() - 1);
  EXPECT_EQ(load().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(load()), HasSubstr(path));
  save();
  std::filesystem::remove(path);
  EXPECT_EQ(ReasonOf(load()), v1::REASON_CHECKPOINT_CORRUPT);
  EXPECT_THAT(Message(load()), HasSubstr(path));
}

// A rank that cannot load makes all ranks fail instead of waiting for it.
TEST_F(CheckpointTest, OneRanksLoadErrorIsEveryones) {
  State state(1);
  ASSERT_TRUE(SaveCheckpoint(Step(1), MetaOf(1), state.tensors(), self_.get()).ok());
  OnRanks(2, [&](Communicator& world) {
    State into(2);
    if (world.rank() == 1) into[1].global_shape = into[1].shard_shape = into[1].tensor.shape = {6};
    const absl::Status status = LoadCheckpoint(Step(1), {}, into.tensors(), &world).status();
    EXPECT_EQ(ReasonOf(status), v1::REASON_INVALID_CONFIG);
    EXPECT_THAT(Message(status), HasSubstr("norm.weight"));
  });
  // Pipeline stages: each rank asks for a part of the tensors, together for all.
  OnRanks(2, [&](Communicator& world) {
    State into(2);
    std::vector<CheckpointTensor> mine;
    for (size_t i = 0; i < 4; ++i) {
      if (static_cast<int>(i % 2) == world.rank()) mine.push_back(into[i]);
    }
    EXPECT_TRUE(LoadCheckpoint(Step(1), {}, mine, &world).ok());
  });
}

}  // namespace
}  // namespace mbridge
