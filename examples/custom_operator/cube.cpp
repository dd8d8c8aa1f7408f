// The operator example::Cube (y = x * x * x, float32) for ONNX Runtime.
//
//     g++ -shared -fPIC -O2 cube.cpp -o libcube.so
//
// Only the part of ONNX Runtime's C interface that it uses is declared here. Source: onnxruntime_c_api.h of API 29
// (microsoft/onnxruntime): the functions of OrtApi keep their places for ever, and an OrtCustomOp of version 12 has
// these fields, whatever the release.
#include <cstddef>
#include <cstdint>

namespace {

using Function = void (*)();
struct Api { Function functions[102]; };
struct ApiBase {
  const Api* (*get_api)(std::uint32_t version);
  const char* (*get_version)();
};

constexpr std::uint32_t kVersion = 12;
constexpr int kFloat = 1, kRequired = 0;  // ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, INPUT_OUTPUT_REQUIRED

// Places in OrtApi.
enum Place {
  kCreateCustomOpDomain = 26, kCustomOpDomainAdd = 27, kAddCustomOpDomain = 28, kGetTensorMutableData = 51,
  kGetDimensionsCount = 61, kGetDimensions = 62, kGetTensorTypeAndShape = 65, kGetInput = 90, kGetOutput = 91,
  kReleaseShape = 99,
};

const Api* api = nullptr;

template <typename... Arguments>
void* call(Place place, Arguments... arguments) {  // every one of these gives a status, which is null where it is well
  return reinterpret_cast<void* (*)(Arguments...)>(api->functions[place])(arguments...);
}

struct CustomOp {
  std::uint32_t version = kVersion;
  void* (*create_kernel)(const CustomOp*, const Api*, const void*) = [](const CustomOp* op, const Api*, const void*) {
    return const_cast<void*>(static_cast<const void*>(op));
  };
  const char* (*name)(const CustomOp*) = [](const CustomOp*) { return "Cube"; };
  const char* (*provider)(const CustomOp*) = [](const CustomOp*) -> const char* { return nullptr; };
  int (*input_type)(const CustomOp*, std::size_t) = [](const CustomOp*, std::size_t) { return kFloat; };
  std::size_t (*inputs)(const CustomOp*) = [](const CustomOp*) -> std::size_t { return 1; };
  int (*output_type)(const CustomOp*, std::size_t) = [](const CustomOp*, std::size_t) { return kFloat; };
  std::size_t (*outputs)(const CustomOp*) = [](const CustomOp*) -> std::size_t { return 1; };
  void (*compute)(void*, void* context) = [](void*, void* context) {
    const void* input = nullptr;
    void *shape = nullptr, *output = nullptr, *from = nullptr, *to = nullptr;
    std::size_t rank = 0, count = 1;
    std::int64_t dims[8] = {};
    call(kGetInput, context, std::size_t{0}, &input);
    call(kGetTensorTypeAndShape, input, &shape);
    call(kGetDimensionsCount, shape, &rank);
    if (rank <= 8) call(kGetDimensions, shape, dims, rank);
    reinterpret_cast<void (*)(void*)>(api->functions[kReleaseShape])(shape);
    if (rank > 8) return;
    call(kGetOutput, context, std::size_t{0}, dims, rank, &output);
    call(kGetTensorMutableData, input, &from);
    call(kGetTensorMutableData, output, &to);
    for (std::size_t axis = 0; axis < rank; ++axis) count *= dims[axis];
    const auto* x = static_cast<const float*>(from);
    for (std::size_t index = 0; index < count; ++index) static_cast<float*>(to)[index] = x[index] * x[index] * x[index];
  };
  void (*destroy)(void*) = [](void*) {};
  int (*input_kind)(const CustomOp*, std::size_t) = [](const CustomOp*, std::size_t) { return kRequired; };
  int (*output_kind)(const CustomOp*, std::size_t) = [](const CustomOp*, std::size_t) { return kRequired; };
  int (*input_memory)(const CustomOp*, std::size_t) = [](const CustomOp*, std::size_t) { return 0; };
};

const CustomOp cube;

}  // namespace

extern "C" void* RegisterCustomOps(void* options, const ApiBase* base) {
  static void* domain = nullptr;
  api = base->get_api(kVersion);
  if (domain == nullptr) {
    if (void* status = call(kCreateCustomOpDomain, "example", &domain)) return status;
    if (void* status = call(kCustomOpDomainAdd, domain, &cube)) return status;
  }
  return call(kAddCustomOpDomain, options, domain);
}
