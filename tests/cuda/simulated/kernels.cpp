// The computing mode: CPU kernels compute what torch's operators do on a CUDA device, in the order of the stream.
// Device memory is memory of the host, so a CPU tensor can have the bytes of a CUDA tensor. The operators that hook.py
// chooses get a kernel for CUDA, which allocates its results on the device, in the shapes that the kernel for meta
// tensors gives, and queues the CPU kernel on the current stream. Like a kernel of CUDA it does not keep its tensors
// alive. Scratch memory of the CPU kernel is not the device's.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "streams.h"

namespace {
using at::IValue;
using at::Tensor;
using c10::DispatchKey;
using Stack = torch::jit::Stack;

// Queue `work` on the current stream. Autograd and the caller's modes are none of its business.
void queue(const std::string& what, std::function<void()> work) {
  C10_CUDA_CHECK(simulated::enqueue(c10::cuda::getCurrentCUDAStream(), [=] {
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      work();
    } catch (const std::exception& error) {
      simulated::fail(what + " failed on its stream: " + error.what());
    }
  }));
}

// A CPU tensor with the bytes of `tensor`. A tensor of the host is copied, because the caller may write to it again.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "lazy conjugates and negatives are not simulated");
  auto* bytes = const_cast<void*>(tensor.const_data_ptr());
  auto options = tensor.options().device(at::kCPU);
  Tensor alias = tensor.is_cuda() ? at::from_blob(bytes, tensor.sizes(), tensor.strides(), options)
                                  : tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}
Tensor like(const Tensor& tensor, at::Device device) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

// `value` with `change` done to the tensors in it, and its devices replaced.
IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& change, at::Device device) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector()) list.push_back(each ? std::optional(change(*each)) : each);
    return list;
  }
  return value;
}
Stack mapped(Stack stack, const std::function<Tensor(const Tensor&)>& change, at::Device device) {
  for (IValue& value : stack) value = mapped(value, change, device);
  return stack;
}
std::vector<Tensor> tensors_of(const Stack& stack) {
  std::vector<Tensor> found;
  auto keep = [&](const Tensor& tensor) { return found.emplace_back(tensor); };
  mapped(stack, keep, at::kCPU);
  return found;
}

// A generator of the CPU, seeded by where the device's generator is. A generator of the device that was just seeded
// gives the numbers that a CPU's with the same seed gives.
at::Generator drawn_from(const std::optional<at::Generator>& given, at::Device device) {
  const auto& usual = at::cuda::detail::getDefaultCUDAGenerator(device.index());
  auto* own = at::get_generator_or_default<at::CUDAGeneratorImpl>(given, usual);
  std::lock_guard<std::mutex> guard(own->mutex_);
  auto [seed, offset] = own->philox_engine_inputs(4);
  return at::make_generator<at::CPUGeneratorImpl>(offset ? seed ^ (offset * 0x9E3779B97F4A7C15ull) : seed);
}

// A call of an operator, with CPU tensors.
struct Call {
  c10::OperatorHandle op;
  Stack arguments, results;  // no results of an operator that writes to arguments
  at::Generator generator;
  bool bias_learns;
  IValue operator[](const char* name) const {
    auto position = op.schema().argumentIndexWithName(name);
    return position ? arguments[*position] : IValue();
  }
  Tensor tensor(const char* name) const { return (*this)[name].isTensor() ? (*this)[name].toTensor() : Tensor(); }
};

// Dropout, as the CPU computes it: the mask is divided by 1 − p, then multiplied.
void dropout(const Call& call) {
  Tensor input = call.tensor("input"), noise = at::ones_like(input);
  double p = call["p"].toDouble();
  bool drops = p > 0 && (call["train"].isNone() || call["train"].toBool());
  if (drops) noise.bernoulli_(1 - p, call.generator);
  call.results[1].toTensor().copy_(noise != 0);
  if (drops) noise.div_(1 - p);
  call.results[0].toTensor().copy_(input * noise);
}
void dropout_backward(const Call& call) {
  Tensor gradient = call.tensor("grad_output"), mask = call.tensor("mask").to(gradient.scalar_type());
  call.results[0].toTensor().copy_(gradient * mask.mul_(call["scale"].toDouble()));
}

// Fused attention, as on the CPU: by its fused kernel, or by the formula in float32 where that kernel cannot.
struct Attention {
  const Call& call;
  Tensor query = call.tensor("query"), key = call.tensor("key"), value = call.tensor("value");
  Tensor bias = call.tensor("attn_bias");
  std::optional<Tensor> mask = bias.defined() ? std::optional(bias) : std::nullopt;
  double p = call["dropout_p"].toDouble();
  bool causal = call["is_causal"].toBool();
  std::optional<double> scale = call["scale"].toOptional<double>();
  Tensor formula(const std::optional<at::Generator>& generator) const {
    double root = std::sqrt(scale.value_or(1 / std::sqrt((double)query.size(-1))));
    auto type = query.scalar_type(), wide = at::promote_types(type, at::kFloat);
    Tensor weights = at::matmul(query.to(wide) * root, key.to(wide).transpose(-2, -1) * root);
    if (causal) {
      Tensor allowed = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
      weights = weights.masked_fill(allowed.logical_not(), -std::numeric_limits<double>::infinity());
    }
    if (bias.defined()) weights = weights + bias;
    weights = at::_safe_softmax(weights, -1);
    if (p > 0) weights = weights * at::empty_like(weights).bernoulli_(1 - p, generator).div_(1 - p);
    return at::matmul(weights, value.to(wide)).to(type);
  }
};

// The seed of the forward's dropout is one of its results, from which the backward draws the same numbers.
void attend(const Call& call) {
  Attention its{call};
  Tensor output = call.results[0].toTensor(), sums = call.results[1].toTensor();
  if (its.p > 0)
    call.results[call.results.size() == 4 ? 2 : 6].toTensor().copy_(
        at::scalar_tensor((int64_t)call.generator.current_seed(), at::kLong));
  if (its.p > 0 || call.bias_learns) return (void)output.copy_(its.formula(call.generator));
  auto [found, logarithms] = at::_scaled_dot_product_flash_attention_for_cpu(its.query, its.key, its.value, 0,
                                                                             its.causal, its.mask, its.scale);
  output.copy_(found);
  if (sums.size(-1)) sums.narrow(-1, 0, logarithms.size(-1)).copy_(logarithms);
}
void attend_backward(const Call& call) {
  Attention its{call};
  Tensor gradient = call.arguments[0].toTensor();
  std::vector<Tensor> found(4), results = tensors_of(call.results);
  if (its.p > 0 || (results.size() > 3 && results[3].defined())) {
    c10::impl::ForceDispatchKeyGuard normal{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
    at::AutoGradMode enabled(true);
    Tensor* of[] = {&its.query, &its.key, &its.value, &its.bias};
    for (Tensor* each : of)
      if (each->defined()) *each = each->detach().requires_grad_();
    auto seed = call.tensor("philox_seed").reshape(-1)[0].to(at::kLong).item<int64_t>();
    its.formula(at::make_generator<at::CPUGeneratorImpl>(seed)).backward(gradient);
    for (int i = 0; i < 4 && of[i]->defined(); ++i) found[i] = of[i]->grad();
  } else {
    Tensor sums = call.tensor("logsumexp").narrow(-1, 0, its.query.size(-2));
    sums = sums.transpose(1, 2).contiguous().transpose(1, 2);
    std::tie(found[0], found[1], found[2]) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, its.query, its.key, its.value, call.tensor("out"), sums, 0, its.causal, its.mask, its.scale);
  }
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].defined()) results[i].copy_(found[i]);
}

// What computes an operator without a CPU kernel, or with one that draws its own numbers; null for the others.
auto kernel_here(const std::string& name) -> void (*)(const Call&) {
  if (name.starts_with("aten::_scaled_dot_product")) return name.ends_with("_backward") ? attend_backward : attend;
  if (name.starts_with("aten::native_dropout")) return name.ends_with("_backward") ? dropout_backward : dropout;
  return nullptr;
}

// The positions of the arguments that the results are: every result of a function in place or with `out`, or none.
std::vector<size_t> written(const c10::FunctionSchema& schema) {
  std::vector<size_t> found;
  for (const auto& result : schema.returns())
    for (size_t position = 0; result.alias_info() && position < schema.arguments().size(); ++position) {
      const auto* alias = schema.arguments()[position].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) found.push_back(position);
    }
  return found;
}
bool is_mask(const Tensor& index) { return index.defined() && index.element_size() == 1; }

void on_stream(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  std::string name = toString(op.operator_name());
  Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  auto tensors = tensors_of(arguments);
  std::erase_if(tensors, [](const Tensor& tensor) { return !tensor.defined(); });
  std::optional<at::Device> device;
  for (const Tensor& tensor : tensors)
    if (tensor.is_cuda() && !device) device = tensor.device();
  bool by_value = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  bool takes_host = name.starts_with("aten::_foreach");  // which takes lists of scalars
  for (const IValue& value : arguments) {
    if (value.isDevice() && !device) device = value.toDevice();
    if (!value.isOptionalTensorList()) continue;
    takes_host = true;  // indices, of which masks alone must be counted
    by_value = std::ranges::any_of(tensors_of({value}), is_mask);
  }
  if (!device || !device->has_index()) device = at::Device(at::kCUDA, c10::cuda::current_device());
  for (const Tensor& tensor : tensors)
    TORCH_CHECK(tensor.device() == *device || (tensor.is_cpu() && (takes_host || tensor.dim() == 0)), name,
                ": expected all tensors to be on the same device, found ", *device, " and ", tensor.device());
  c10::cuda::CUDAGuard guard(*device);
  at::Generator generator;
  auto given = schema.argumentIndexWithName("generator"), dropped = schema.argumentIndexWithName("dropout_p");
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded) && !(dropped && arguments[*dropped].toDouble() == 0);
  auto* own = kernel_here(name);
  TORCH_CHECK_NOT_IMPLEMENTED(!draws || given || own, name, " draws random numbers in a way that is not simulated");
  auto drawn = given ? arguments[*given].toOptional<at::Generator>() : std::nullopt;
  if (draws || given) generator = drawn_from(drawn, *device);
  if (given) arguments[*given] = generator;
  auto outs = written(schema);
  bool is_new = schema.returns().size() > outs.size();
  TORCH_CHECK_NOT_IMPLEMENTED(outs.empty() || !is_new, name, " returns arguments and new tensors: not simulated");
  if (is_new && (by_value || !op.hasComputedKernelForDispatchKey(DispatchKey::Meta))) {  // at once, as CUDA's own
    c10::cuda::getCurrentCUDAStream().synchronize();
    at::AutoDispatchBelowADInplaceOrView below;
    Stack host = mapped(arguments, on_host, at::kCPU);
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &host);
    auto put = [&](const Tensor& each) { return each.defined() ? each.to(*device) : each; };
    for (const IValue& value : mapped(host, put, *device)) stack->push_back(value);
    return;
  }
  Stack results;
  if (is_new || (!outs.empty() && schema.name().back() != '_')) {  // shapes
    auto is_number = [](const Tensor& each) { return each.defined() && each.is_cpu() && each.dim() == 0; };
    auto as_meta = [&](const Tensor& each) { return is_number(each) ? each : like(each, at::kMeta); };
    Stack metas = results = mapped(arguments, as_meta, at::kMeta);
    if (given) results[*given] = IValue();
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &results);
    for (size_t out : outs) {
      if (!arguments[out].isTensor()) continue;
      Tensor wanted = metas[out].toTensor(), written = arguments[out].toTensor();
      if (written.sizes() == wanted.sizes()) continue;
      written.resize_(wanted.sizes());
      if (written.strides() != wanted.strides()) written.as_strided_(wanted.sizes(), wanted.strides());
    }
  }
  results.resize(schema.returns().size());
  for (size_t position = 0; position < outs.size(); ++position) results[position] = arguments[outs[position]];
  auto made = [&](const Tensor& each) { return each.defined() && each.is_meta() ? like(each, *device) : each; };
  results = mapped(results, made, *device);
  auto bias = schema.argumentIndexWithName("attn_bias");
  bool learns = bias && arguments[*bias].isTensor() && arguments[*bias].toTensor().requires_grad();
  Call call{op, mapped(arguments, on_host, at::kCPU), {}, generator, learns};
  if (outs.empty()) call.results = mapped(results, on_host, at::kCPU);
  queue(name, [call, own] {
    if (own) return own(call);
    Stack host = call.arguments;
    call.op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &host);
    auto to = tensors_of(call.results), from = tensors_of(host);
    for (size_t i = 0; i < to.size(); ++i)
      if (to[i].defined()) to[i].copy_(from[i]);
  });
  for (IValue& value : results) stack->push_back(std::move(value));
}

// A copy between tensors of one device that a kernel of CUDA's would do; all other copies are torch's own code.
Tensor& copy_(c10::DispatchKeySet, Tensor& self, const Tensor& source, bool non_blocking) {
  bool same = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes();
  // Between host and device, torch makes contiguous tensors of the same type first, with this function.
  if (!self.is_cuda() || !source.is_cuda() || (same && self.is_contiguous() && source.is_contiguous()))
    return at::native::copy_(self, source, non_blocking);
  if (self.device() != source.device()) return self.copy_(source.contiguous().to(self.device()));
  c10::cuda::CUDAGuard guard(self.device());
  queue("copy_", [to = on_host(self), from = on_host(source)] { to.copy_(from); });
  return self;
}
}  // namespace
// Replace torch's kernel of the operator `name` for CUDA in this process; copy_ has one of its own.
extern "C" void simulated_kernel(const char* name) {
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);  // each says that a kernel is replaced
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  bool copies = !strcmp(name, "aten::copy_");
  library.impl(name, copies ? torch::CppFunction(&copy_) : torch::CppFunction::makeFromBoxedFunction<&on_stream>());
}
