#include "decode.h"

#include <cstring>
#include <memory>

#include "for_each_row.h"
#include "rows.h"

namespace grpo_fast::cpu {
namespace {

class DecodeWorker {
 public:
  explicit DecodeWorker(const DecodeArgs& args)
      : args_(args), bytes_(element_size(args.dtype)), queries_(args.heads / args.kinds),
        attend_(isa().attend(args.dtype)),
        scratch_(std::make_unique_for_overwrite<float[]>(scratch_floats(queries_, args.size, args.longest))) {}

  void operator()(int64_t unit, int64_t) {
    const int64_t row = unit / args_.kinds, kind = unit % args_.kinds;
    const int64_t group = args_.groups[row], length = args_.lengths[row], age = args_.ages[row];
    append(args_.key, args_.keys, row, kind, age);
    append(args_.value, args_.values, row, kind, age);
    const int64_t hidden = std::max<int64_t>(0, length + age + 1 - args_.window);  // tokens before the window
    const int64_t of_prompt = std::min(hidden, length), of_own = hidden - of_prompt;
    Attend a;
    a.query = at(args_.query, row, kind * queries_, 0);
    a.query_stride = args_.query.head;
    a.queries = queries_;
    a.size = args_.size;
    a.prompt = span(args_.prompt_keys, args_.prompt_values, group, kind, of_prompt, length);
    a.own = span(args_.keys, args_.values, row, kind, of_own, age + 1);
    a.scale = args_.scale;
    a.softcap = args_.softcap;
    a.out = static_cast<char*>(args_.out) + (row * args_.heads + kind * queries_) * args_.size * bytes_;
    a.scratch = scratch_.get();
    attend_(a);
  }

 private:
  char* at(const Heads& x, int64_t row, int64_t head, int64_t token) const {
    return static_cast<char*>(x.data) + (row * x.row + head * x.head + token * x.token) * bytes_;
  }

  void append(const Heads& from, const Heads& to, int64_t row, int64_t kind, int64_t age) const {
    std::memcpy(at(to, row, kind, age), at(from, row, kind, 0), args_.size * bytes_);
  }

  Span span(const Heads& keys, const Heads& values, int64_t row, int64_t kind, int64_t first, int64_t end) const {
    return {at(keys, row, kind, first), at(values, row, kind, first), keys.token, values.token, end - first};
  }

  const DecodeArgs& args_;
  const int64_t bytes_, queries_;
  const AttendFunction attend_;
  const std::unique_ptr<float[]> scratch_;
};

}  // namespace

void decode_attention(const DecodeArgs& args) {
  // A key and value for a query cost about as much as D / 8 logits.
  const int64_t logits = args.longest * (args.heads / args.kinds) * args.size / 8 + 1;
  for_each_row(args.rows * args.kinds, logits, [&] { return DecodeWorker(args); });
}

}  // namespace grpo_fast::cpu
