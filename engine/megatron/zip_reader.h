// Reads zip archives of uncompressed entries, as torch.save writes them: a stretch of a file whose end is the archive's end.
// Nothing is ever unpacked to the disk. Format: PKWARE's APPNOTE.TXT 6.3, with Zip64.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "engine/core/file.h"

namespace mbridge {

struct ZipEntry {
  int64_t offset = 0;  // Of the data, in the file.
  int64_t bytes = 0;
};

// DATA_LOSS naming `file` for anything that is not a whole archive within the stretch; INVALID_ARGUMENT (UNSUPPORTED_MODEL) for
// compressed or encrypted entries. Names are unique, relative and without "..".
absl::StatusOr<std::map<std::string, ZipEntry>> ReadZipDirectory(const FileReader& file, int64_t begin, int64_t bytes);

}  // namespace mbridge
