// A command-line option that takes one of a few words. For programs, which link CLI11; mb_recipes itself does not.
#pragma once

#include <CLI/CLI.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "recipes/config/schema.h"

namespace mbridge::recipes {

// As CLI::IsMember, with the word that was probably meant. Not for devices: gpu is but a letter from cpu.
inline CLI::Validator OneOf(const std::vector<std::string>& words) {
  const std::string list = "{" + CLI::detail::join(words, ",") + "}";
  const auto check = [words, list](const std::string& word) -> std::string {
    if (std::find(words.begin(), words.end(), word) != words.end()) return "";
    return word + " not in " + list + DidYouMean(word, words);
  };
  return CLI::Validator(list).operation([check](std::string& word) { return check(word); });
}

}  // namespace mbridge::recipes
