#include "ferro/fingerprint.hpp"

namespace ferro {

const char* name_of(ReduceOp reduce_op) {
  static constexpr const char* names[kReduceOpCount] = {"sum", "mean", "prod", "min", "max"};
  const auto index = static_cast<std::size_t>(reduce_op);
  return index < kReduceOpCount ? names[index] : "unknown";
}

const char* name_of(DType dtype) {
  static constexpr const char* names[kDTypeCount] = {
      "bool",    "int8",      "uint8",      "int16",       "uint16",      "int32",
      "uint32",  "int64",     "uint64",     "float16",     "bfloat16",    "float32",
      "float64", "complex64", "complex128", "float8_e4m3", "float8_e5m2",
  };
  const auto index = static_cast<std::size_t>(dtype);
  return index < kDTypeCount ? names[index] : "unknown";
}

namespace {

// "allreduce(sum, float32, count 5)".
std::string describe(const Fingerprint& fingerprint) {
  std::string arguments;
  const auto add = [&arguments](const std::string& argument) {
    arguments += (arguments.empty() ? "" : ", ") + argument;
  };
  if (has_reduce_op(fingerprint.op)) add(name_of(fingerprint.reduce_op));
  if (fingerprint.op != Op::barrier && fingerprint.op != Op::split) {
    add(name_of(fingerprint.dtype));
    add(fingerprint.count == Fingerprint::kUneven ? "uneven counts"
                                                  : "count " + std::to_string(fingerprint.count));
  }
  if (has_root(fingerprint.op)) add("root " + std::to_string(fingerprint.root));
  if (fingerprint.tag != 0) add("tag " + std::to_string(fingerprint.tag));
  return std::string(name_of(fingerprint.op)) + "(" + arguments + ")";
}

// "rank 0 called allreduce(sum, float32, count 5), rank 2 called barrier()".
std::string describe_mismatch(int first_rank, const Fingerprint& first, int second_rank,
                              const Fingerprint& second) {
  if (first.op == Op::split && second.op == Op::split && first.sequence == second.sequence)
    return "ranks " + std::to_string(first_rank) + " and " + std::to_string(second_rank) +
           " are at different steps of split, which only one thread of a rank may call at a time";
  const auto side = [&](int rank, const Fingerprint& fingerprint) {
    std::string text = "rank " + std::to_string(rank) + " called " + describe(fingerprint);
    if (first.sequence != second.sequence) text += " as collective #" + std::to_string(fingerprint.sequence);
    return text;
  };
  return side(first_rank, first) + ", " + side(second_rank, second);
}

}  // namespace

Error mismatch_error(int own_rank, int first_rank, const Fingerprint& first, int second_rank,
                     const Fingerprint& second) {
  return Error(ErrorCode::mismatch, own_rank == second_rank ? first_rank : second_rank,
               describe_mismatch(first_rank, first, second_rank, second));
}

Error unpaired_error(int own_rank, int sender, std::uint64_t sent, int receiver, std::uint64_t expected) {
  return Error(ErrorCode::mismatch, own_rank == receiver ? sender : receiver,
               "rank " + std::to_string(sender) + " sends " + std::to_string(sent) +
                   (sent == 1 ? " element" : " elements") + " to rank " + std::to_string(receiver) +
                   ", which expects " + std::to_string(expected));
}

}  // namespace ferro
