// Numbers for the runtime without kernels: operations of the CUDA device are computed by the CPU's kernels, on device memory.
//
// While it is on (fake_compute), each ATen operation that has a CUDA kernel is given to its stream as a call on the host. The call
// runs the CPU's kernel on CPU tensors over the same device memory. It does not keep that memory: an operation that comes to run
// after its memory was given to another tensor computes with the other tensor's bytes, as on a GPU. Shapes of results come from
// PyTorch's meta kernels, at the call. An operation without one, or that returns numbers, waits for its stream.
//
// Operations that only CUDA has raise an error, or are computed by their formulas below. Kernels of Triton compute nothing.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

extern "C" {
void fake_count(const char* name);
void fake_assertion(void);
int fake_give(cudaStream_t stream, void (*call)(void*), void* argument);
char* fake_reach(const void* address, size_t size);
}

namespace {

using torch::jit::Stack;

// Operations whose CUDA kernels are right without computing: they allocate, resize, describe memory, or copy it.
const std::set<std::string> kLeftAlone = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::_pin_memory",
    "aten::is_pinned", "aten::_local_scalar_dense", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold"};

// Composite operations that CUDA divides into kernels of its own (cuDNN's convolution), and the CPU into others.
const std::vector<c10::OperatorName> kWhole = {{"aten::convolution", ""}, {"aten::convolution_backward", ""}};

// What a thread has set up, such as autograd or a mode of Python, is not for kernels.
struct WithoutModes : c10::impl::ForceDispatchKeyGuard {
  WithoutModes() : ForceDispatchKeyGuard(keys()) {}

  static c10::impl::LocalDispatchKeySet keys() {
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.included_ = c10::default_included_set;
    keys.excluded_ = c10::default_excluded_set | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
                     c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    return keys;
  }
};

// A CPU tensor over the memory of a device tensor, or a copy of a CPU tensor (a number) as it is now.
at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_cuda()) {
    at::Tensor copied = tensor.clone();
    copied.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return copied;
  }
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  char* memory = fake_reach(tensor.const_data_ptr(), (last + 1) * tensor.element_size());
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), options);
}

using OnTensor = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue mapped(const c10::IValue& value, const OnTensor& on_tensor) {
  if (value.isTensor()) return on_tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(on_tensor(each));
    return list;
  }
  if (value.isList() && value.toListRef().size()) {  // of tensors that may be missing
    bool tensors = false;
    for (const auto& each : value.toListRef()) tensors |= each.isTensor();
    if (!tensors) return value;
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toListRef())
      list.push_back(each.isTensor() ? std::optional<at::Tensor>(on_tensor(each.toTensor())) : std::nullopt);
    return list;
  }
  return value;
}

Stack mapped(const Stack& stack, const OnTensor& on_tensor) {
  Stack result;
  for (const auto& value : stack) result.push_back(mapped(value, on_tensor));
  return result;
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  mapped(value, [&](const at::Tensor& tensor) { return tensors.push_back(tensor), tensor; });
}

// A generator of the CPU whose numbers depend on the state of CUDA's, which moves on.
at::Generator next_generator(const std::optional<at::Generator>& given) {
  auto* cuda = at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> held(cuda->mutex_);
  auto [seed, offset] = cuda->philox_engine_inputs(4);
  return at::detail::createCPUGenerator(seed * 6364136223846793005ull + offset * 1442695040888963407ull + 1);
}

struct Call {
  c10::OperatorHandle op;
  Stack operands;
  std::vector<at::Tensor> results;  // CPU tensors over the memory of results that are new
  std::optional<at::Generator> generator;  // of an operation that draws and takes no generator

  void run() {
    WithoutModes plain;
    at::Generator main = at::detail::getDefaultCPUGenerator();
    at::Tensor state;
    if (generator) state = main.get_state(), main.set_state(generator->get_state());
    Stack stack = operands;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    if (generator) main.set_state(state);
    std::vector<at::Tensor> made;
    if (results.empty()) return;
    for (const auto& value : stack) collect(value, made);
    for (size_t i = 0; i < results.size(); i++)
      if (results[i].defined() && made[i].defined()) results[i].copy_(made[i]);
  }
};

void give(std::unique_ptr<Call> call) {
  int error = fake_give(at::cuda::getCurrentCUDAStream().stream(), [](void* call) {
    std::unique_ptr<Call> owned((Call*)call);
    try {
      owned->run();
    } catch (const c10::IndexError& error) {  // CUDA's kernels assert that an index is in range
      fprintf(stderr, "CUDA runtime without a GPU: %s: %s: device-side assert\n", c10::toString(owned->op.operator_name()).c_str(),
              error.what_without_backtrace());
      fake_assertion();
    } catch (const std::exception& error) {
      std::string reason = error.what();
      std::string what = "failed: " + c10::toString(owned->op.operator_name()) + ": " + reason.substr(0, reason.find('\n'));
      fake_count(what.c_str());
      fprintf(stderr, "CUDA runtime without a GPU: %s. Its results are undefined\n", what.c_str());
    }
  }, call.get());
  TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(cudaError_t(error)));
  call.release();
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The results of an operation as meta tensors; nothing where there is no meta kernel for it.
std::optional<Stack> described(const c10::OperatorHandle& op, const Stack& operands) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  WithoutModes plain;
  Stack stack = mapped(operands, [](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
  });
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (stack[i].isGenerator()) stack[i] = c10::IValue();
    if (stack[i].isDevice()) stack[i] = c10::Device(at::kMeta);
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {  // if the operands are wrong, the kernel says so
    return std::nullopt;
  }
  return stack;
}

bool only_tensors(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    bool list = kind == c10::TypeKind::ListType && result.type()->containedType(0)->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !list) return false;
  }
  return true;
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  size_t number = schema.arguments().size();
  Stack operands(stack->end() - number, stack->end());
  std::vector<at::Tensor> tensors;
  for (const auto& value : operands) collect(value, tensors);
  c10::OptionalDeviceGuard device;
  for (const auto& tensor : tensors)
    if (tensor.defined() && tensor.is_cuda()) { device.reset_device(tensor.device()); break; }
  std::optional<at::Generator> drawn;
  bool has_generator = false;
  for (size_t i = 0; i < number; i++) {
    auto type = schema.arguments()[i].type();
    if (type->str().find("Generator") == std::string::npos) continue;
    has_generator = true;
    operands[i] = next_generator(operands[i].isNone() ? std::nullopt : std::optional<at::Generator>(operands[i].toGenerator()));
  }
  if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) drawn = next_generator(std::nullopt);

  std::optional<Stack> meta = only_tensors(schema) ? described(op, operands) : std::nullopt;
  bool in_place = true;  // each result is an operand that is written into
  for (const auto& result : schema.returns()) in_place &= writes(result);

  if (meta && in_place) {  // operands `out` may have another size so far
    size_t next = 0;
    for (size_t i = 0; i < number && next < schema.returns().size(); i++)
      if (writes(schema.arguments()[i]) && schema.arguments()[i].is_out()) {
        if (operands[i].isTensor()) at::native::resize_output(operands[i].toTensor(), (*meta)[next].toTensor().sizes());
        next++;
      }
  }
  auto call = std::make_unique<Call>(Call{op, mapped(operands, host_alias), {}, drawn});
  for (auto& value : call->operands)
    if (value.isDevice()) value = c10::Device(at::kCPU);

  Stack results;
  if (in_place) {
    for (const auto& result : schema.returns())
      for (size_t i = 0; i < number; i++)
        if (schema.arguments()[i].alias_info() && *schema.arguments()[i].alias_info() == *result.alias_info()) {
          results.push_back(operands[i]);
          break;
        }
    give(std::move(call));
  } else if (meta) {
    for (const auto& value : *meta)
      results.push_back(mapped(value, [&](const at::Tensor& described) {
        if (!described.defined()) return call->results.push_back({}), described;
        at::Tensor made = at::empty_strided(described.sizes(), described.strides(), described.options().device(at::kCUDA));
        call->results.push_back(host_alias(made));
        return made;
      }));
    give(std::move(call));
  } else {  // its results depend on numbers
    c10::cuda::getCurrentCUDAStream().synchronize();
    WithoutModes plain;
    Stack made = call->operands;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &made);
    for (const auto& value : made)
      results.push_back(mapped(value, [](const at::Tensor& tensor) {
        if (!tensor.defined() || tensor.is_cuda()) return tensor;
        at::Tensor moved = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCUDA));
        host_alias(moved).copy_(tensor);
        return moved;
      }));
    fake_count(("waited for: " + c10::toString(op.operator_name())).c_str());
  }
  torch::jit::drop(*stack, number);
  for (auto& result : results) stack->push_back(std::move(result));
}

void not_computed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  fake_count(("not computed: " + c10::toString(op.operator_name())).c_str());
  TORCH_CHECK(false, "only CUDA has ", op.operator_name(), ", which the runtime without kernels cannot compute");
}

// Copies from and to the host stay copies of the runtime. What they do on the device, before or behind, are operations again.
void copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  at::Tensor self = (*stack)[stack->size() - 3].toTensor(), source = (*stack)[stack->size() - 2].toTensor();
  if (self.is_cuda() && source.is_cuda()) return compute(op, keys, stack);
  at::native::copy_(self, source, stack->back().toBool());
  torch::jit::drop(*stack, 3);
  stack->push_back(self);
}

// ---- what only CUDA has, by operations that the CPU has too ------------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x, at::IntArrayRef shape,
                                                     const at::Tensor& rstd, const std::optional<at::Tensor>& weight,
                                                     std::array<bool, 2> wanted) {
  std::vector<int64_t> inner, outer;
  for (int64_t d = 0; d < x.dim(); d++) (d < x.dim() - int64_t(shape.size()) ? outer : inner).push_back(d);
  at::Tensor normed = x * rstd, weighted = weight && weight->defined() ? grad * *weight : grad;
  at::Tensor of_x = rstd * (weighted - normed * (weighted * normed).mean(inner, true));
  at::Tensor of_weight = outer.empty() ? grad * normed : (grad * normed).sum(outer);
  return {wanted[0] ? of_x.to(x.scalar_type()) : at::Tensor(), wanted[1] ? of_weight.to(x.scalar_type()) : at::Tensor()};
}

struct Attention {  // in float32 at least; of [batch, heads, rows, width], where several heads of q may share one of k and v
  at::Tensor q, k, v;
  int64_t sharing;
  double scale;
  at::Tensor probabilities, logsumexp;
  at::Tensor kept;  // 0, or 1 / (1 - dropout), for each probability: drawn from a seed, from which backward draws it again

  Attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias, bool causal,
            double dropout, const at::Tensor& seed, std::optional<double> given_scale) {
    auto wide = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    sharing = query.size(1) / key.size(1);
    q = query.to(wide), k = key.to(wide).repeat_interleave(sharing, 1), v = value.to(wide).repeat_interleave(sharing, 1);
    scale = given_scale.value_or(1 / std::sqrt(double(q.size(-1))));
    at::Tensor scores = q.matmul(k.transpose(-2, -1)) * scale;
    if (bias && bias->defined()) scores = scores + *bias;
    if (causal) scores = scores.masked_fill(at::ones_like(scores, at::kBool).triu(1), -INFINITY);
    logsumexp = scores.logsumexp(-1);
    probabilities = (scores - logsumexp.unsqueeze(-1)).exp();
    if (!dropout) return;
    at::Generator generator = at::detail::createCPUGenerator(seed.item<int64_t>());
    kept = (at::rand(probabilities.sizes(), generator, probabilities.options()) >= dropout).to(wide) / (1 - dropout);
  }

  at::Tensor dropped() const { return kept.defined() ? probabilities * kept : probabilities; }

  at::Tensor output(const at::Tensor& query) const { return dropped().matmul(v).to(query.scalar_type()); }

  at::Tensor of_shared(const at::Tensor& gradient) const { return gradient.unflatten(1, {gradient.size(1) / sharing, sharing}).sum(2); }

  // Gradients of q, k, v and the scores.
  std::array<at::Tensor, 4> backward(const at::Tensor& given, const at::Tensor& output) const {
    at::Tensor grad = given.to(q.scalar_type());
    at::Tensor of_probabilities = grad.matmul(v.transpose(-2, -1));
    if (kept.defined()) of_probabilities = of_probabilities * kept;
    at::Tensor of_scores = probabilities * (of_probabilities - (grad * output).sum(-1, true));
    return {of_scores.matmul(k) * scale, of_shared(of_scores.transpose(-2, -1).matmul(q) * scale),
            of_shared(dropped().transpose(-2, -1).matmul(grad)), of_scores};
  }
};

at::Tensor zero() { return at::zeros({}, at::kLong); }
at::Tensor drawn_seed() { return at::randint(std::numeric_limits<int64_t>::max(), {}, at::kLong); }

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias, bool wants_logsumexp, double dropout,
    bool causal, std::optional<double> scale) {
  at::Tensor seed = drawn_seed();
  Attention made(q, k, v, bias, causal, dropout, seed, scale);
  int64_t rows = q.size(2), padded = wants_logsumexp ? (rows + 31) / 32 * 32 : 0;  // as CUDA's kernel has it
  at::Tensor logsumexp = at::full({q.size(0), q.size(1), padded}, INFINITY, made.logsumexp.options());
  if (padded) logsumexp.narrow(-1, 0, rows).copy_(made.logsumexp);
  return {made.output(q), logsumexp, seed, zero()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias, const at::Tensor& output,
    const at::Tensor&, const at::Tensor& seed, const at::Tensor&, double dropout, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  auto made = Attention(q, k, v, bias, causal, dropout, seed, scale).backward(grad, output);
  auto as = [&](int i, const at::Tensor& like) { return wanted[i] ? made[i].to(like.scalar_type()) : at::Tensor(); };
  at::Tensor of_bias;
  if (wanted[3] && bias.defined()) of_bias = made[3].sum_to_size(bias.sizes()).to(bias.scalar_type());
  return {as(0, q), as(1, k), as(2, v), of_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> flash_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal, bool, std::optional<double> scale) {
  at::Tensor seed = drawn_seed();
  Attention made(q, k, v, std::nullopt, causal, dropout, seed, scale);
  at::Tensor output = at::empty_like(q).copy_(made.output(q));  // Inductor's code relies on CUDA's strides
  return {output, made.logsumexp, at::Tensor(), at::Tensor(), q.size(2), k.size(2), at::stack({seed, zero()}), zero(),
          at::empty({0}, q.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& output, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor& state,
    const at::Tensor&, std::optional<double> scale) {
  auto made = Attention(q, k, v, std::nullopt, causal, dropout, state[0], scale).backward(grad, output);
  return {made[0].to(q.scalar_type()), made[1].to(k.scalar_type()), made[2].to(v.scalar_type())};
}

std::unique_ptr<torch::Library> registered, only_of_cuda;

bool gives_a_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

void override_with(const c10::OperatorName& name, torch::CppFunction&& kernel) {
  std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
  registered->impl(full.c_str(), std::move(kernel));
}

}  // namespace

extern "C" void fake_compute(int on) {
  registered.reset();
  only_of_cuda.reset();
  if (!on) return;
  only_of_cuda = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  only_of_cuda->impl("_fused_rms_norm_backward", rms_norm_backward);
  only_of_cuda->impl("_scaled_dot_product_efficient_attention", efficient_attention);
  only_of_cuda->impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
  only_of_cuda->impl("_scaled_dot_product_flash_attention", flash_attention);
  only_of_cuda->impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
  auto& dispatcher = c10::Dispatcher::singleton();
  registered = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) || kLeftAlone.count(name.name) || name.name == "aten::copy_") continue;
    auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || gives_a_view(op->schema())) continue;
    if (op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
      override_with(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
    else
      override_with(name, torch::CppFunction::makeFromBoxedFunction<&not_computed>());
  }
  for (const auto& name : kWhole) override_with(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  override_with({"aten::copy_", ""}, torch::CppFunction::makeFromBoxedFunction<&copy>());
}
