#include "engine/bridge/family_table_test_support.h"

#include <set>

namespace mbridge {
namespace {

TEST(FamilyTableTest, HasARowForEachFixture) {
  std::set<std::string> rows;
  for (const auto& [fixture, cells] : DocumentedFamilies()) rows.insert(fixture);
  EXPECT_EQ(rows, std::set<std::string>(FamilyFixtures().begin(), FamilyFixtures().end()))
      << "`bash tests/models_table.sh` writes the table of docs/models.md anew";
}

}  // namespace
}  // namespace mbridge
