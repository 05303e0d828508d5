// Tables of the manual, from the schema.
#pragma once

#include <string>

namespace mbridge::recipes {

// Markdown: each Megatron-LM flag, its key here and what to know, one table a group.
std::string FlagTableMarkdown();

// Markdown: each key that works, its type, range, default and help, one table a group.
std::string KeyTableMarkdown();

}  // namespace mbridge::recipes
