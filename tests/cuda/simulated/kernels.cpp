// The computing mode: what torch's operators do on a CUDA device, computed by their CPU kernels in the order of the stream.
//
// Device memory is memory of the host, so a CPU tensor can have the bytes of a CUDA tensor. Every operator of ATen that
// has a kernel for CUDA and one for CPUs gets a kernel for CUDA here, which allocates its results on the device, in the
// shapes that the operator's kernel for meta tensors gives, and queues the CPU kernel on the current stream. Like a kernel
// of CUDA it does not keep its tensors alive. Scratch memory of the CPU kernel is not the device's.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>

extern "C" void simulated_fail(const char* message);

namespace {
using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using Stack = torch::jit::Stack;

std::mutex counted;
std::map<std::string, long> counts;  // calls by operator

void count(const std::string& name) { std::lock_guard<std::mutex> guard(counted); ++counts[name]; }

// Queue `work` on the current stream. Autograd and the caller's modes are none of its business.
void enqueue(std::string what, std::function<void()> work) {
  struct Task { std::string what; std::function<void()> work; };
  count(what);
  auto run = [](void* data) {
    std::unique_ptr<Task> task((Task*)data);
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      task->work();
    } catch (const std::exception& error) {
      simulated_fail((task->what + " failed on its stream: " + error.what()).c_str());
    }
  };
  C10_CUDA_CHECK(cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream(), run, new Task{std::move(what), std::move(work)}));
}

// A CPU tensor with the bytes of `tensor`. A tensor of the host is copied, because the caller may write to it again.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "lazy conjugates and negatives are not simulated");
  Tensor alias = tensor.is_cuda()
      ? at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU))
      : tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

Tensor as_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;  // a number beside tensors of the device
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

Tensor like_on_device(const Tensor& tensor, at::Device device) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

// `value` with `change` done to the tensors in it, and its devices replaced.
template <class Change>
IValue mapped(const IValue& value, const Change& change, at::Device device) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional<Tensor>(change(*each)) : std::nullopt);
    return list;
  }
  return value;
}

template <class Change>
Stack mapped(const Stack& stack, const Change& change, at::Device device) {
  Stack result;
  for (const IValue& value : stack) result.push_back(mapped(value, change, device));
  return result;
}

template <class Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  mapped(value, [&](const Tensor& tensor) { return visit(tensor), tensor; }, at::kCPU);
}

// A generator of the CPU, seeded by where the device's generator is. A generator of the device that was just seeded gives
// the numbers that a CPU's with the same seed gives.
at::Generator drawn_from(const std::optional<at::Generator>& given, at::Device device) {
  auto* own = at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator(device.index()));
  std::lock_guard<std::mutex> guard(own->mutex_);
  auto [seed, offset] = own->philox_engine_inputs(4);
  return at::make_generator<at::CPUGeneratorImpl>(offset ? seed ^ (offset * 0x9E3779B97F4A7C15ull) : seed);
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
}

// Compute now, and put the results on the device: for operators whose results depend on values, as in CUDA's own.
void compute_at_once(const c10::OperatorHandle& op, Stack& host, at::Device device) {
  count(toString(op.operator_name()));
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  at::AutoDispatchBelowADInplaceOrView guard;
  run_on_cpu(op, host);
  for (IValue& value : host)
    value = mapped(value, [&](const Tensor& result) {
      Tensor copy = like_on_device(result, device);
      if (copy.defined()) on_host(copy).copy_(result);
      return copy;
    }, device);
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

bool masks(const Stack& arguments) {  // whether an index is a mask, whose true elements must be counted
  for (const IValue& value : arguments)
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& index : value.toOptionalTensorVector())
        if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
  return false;
}

void on_stream(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  std::string name = toString(op.operator_name());
  Stack arguments(stack->end() - schema.arguments().size(), stack->end());
  torch::jit::drop(*stack, arguments.size());
  std::optional<at::Device> device;
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
    each_tensor(value, [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda() && !device) device = tensor.device();
    });
  }
  if (!device || !device->has_index()) device = at::Device(at::kCUDA, c10::cuda::current_device());
  bool takes_host = !name.rfind("aten::_foreach", 0);  // lists of scalars
  for (const IValue& value : arguments) takes_host |= value.isOptionalTensorList();  // indices
  for (const IValue& value : arguments)
    each_tensor(value, [&](const Tensor& tensor) {
      bool here = !tensor.defined() || tensor.device() == *device || (tensor.is_cpu() && (takes_host || tensor.dim() == 0));
      TORCH_CHECK(here, name, ": expected all tensors to be on the same device, found ", *device, " and ", tensor.device());
    });
  c10::cuda::CUDAGuard guard(*device);

  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t position = 0; position < arguments.size(); ++position)
    if (schema.arguments()[position].name() == "generator") {
      auto given = arguments[position].isNone() ? std::nullopt : std::optional<at::Generator>(arguments[position].toGenerator());
      arguments[position] = IValue(drawn_from(given, *device));
      draws = false;
    }
  TORCH_CHECK_NOT_IMPLEMENTED(!draws, name, " draws random numbers in a way that is not simulated");

  auto outs = written(schema);
  bool is_new = schema.returns().size() > outs.size();
  TORCH_CHECK_NOT_IMPLEMENTED(outs.empty() || !is_new, name, " returns arguments and new tensors, which is not simulated");
  bool by_value = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  for (const IValue& value : arguments) by_value &= !value.isOptionalTensorList();  // of indices, only masks decide
  if (is_new && (by_value || masks(arguments) || !op.hasComputedKernelForDispatchKey(DispatchKey::Meta))) {
    Stack host = mapped(arguments, on_host, at::kCPU);
    compute_at_once(op, host, *device);
    for (IValue& value : host) stack->push_back(std::move(value));
    return;
  }

  Stack results;
  bool in_place = schema.name().back() == '_';
  if (!outs.empty() && !in_place || is_new) {  // shapes
    results = mapped(arguments, as_meta, at::kMeta);
    Stack given = results;
    for (IValue& value : results)
      if (value.isGenerator()) value = IValue();
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &results);
    for (size_t out : outs) {
      if (!arguments[out].isTensor()) continue;
      Tensor wanted = given[out].toTensor(), own = arguments[out].toTensor();
      if (own.sizes() == wanted.sizes()) continue;
      own.resize_(wanted.sizes());
      if (own.strides() != wanted.strides()) own.as_strided_(wanted.sizes(), wanted.strides());
    }
  }
  for (size_t position = 0; position < outs.size(); ++position) {
    if (results.size() <= position) results.emplace_back();
    results[position] = arguments[outs[position]];
  }
  for (IValue& value : results)
    value = mapped(value, [&](const Tensor& tensor) { return tensor.defined() && tensor.is_meta() ? like_on_device(tensor, *device) : tensor; }, *device);
  auto host = std::make_shared<Stack>(mapped(arguments, on_host, at::kCPU));
  auto kept = std::make_shared<Stack>(outs.empty() ? mapped(results, on_host, at::kCPU) : Stack());
  enqueue(name, [op, host, kept] {
    run_on_cpu(op, *host);
    for (size_t position = 0; position < kept->size(); ++position) {
      std::vector<Tensor> to;
      each_tensor((*kept)[position], [&](const Tensor& tensor) { to.push_back(tensor); });
      size_t next = 0;
      each_tensor((*host)[position], [&](const Tensor& from) { if (to[next].defined()) to[next].copy_(from); ++next; });
    }
  });
  for (IValue& value : results) stack->push_back(std::move(value));
}

void boxed(const c10::OperatorHandle& op, Stack* stack) { on_stream(op, stack); }

// A copy between tensors of one device that a kernel of CUDA's would do; all other copies are torch's own code.
Tensor& copy_(c10::DispatchKeySet, Tensor& self, const Tensor& source, bool non_blocking) {
  bool on_device = self.is_cuda() && source.is_cuda();
  bool same = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes();
  if (!on_device || (same && self.is_contiguous() && source.is_contiguous())) {
    // Between host and device, torch makes contiguous tensors of the same type first, with this function.
    return at::native::copy_(self, source, non_blocking);
  }
  if (self.device() != source.device()) {
    Tensor arrived = at::empty(self.sizes(), self.options());
    at::native::copy_(arrived, source.to(self.scalar_type()).expand(self.sizes()).contiguous(), non_blocking);
    return self.copy_(arrived);
  }
  c10::cuda::CUDAGuard guard(self.device());
  Tensor to = on_host(self), from = on_host(source);
  enqueue("copy_", [to, from] { to.copy_(from); });
  return self;
}

Tensor allocated(at::IntArrayRef sizes, const Tensor& like, std::optional<at::ScalarType> type = std::nullopt) {
  return at::empty(sizes, like.options().dtype(type.value_or(like.scalar_type())));
}

// Dropout, as the CPU computes it: the mask is divided by 1 − p, then multiplied.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  c10::cuda::CUDAGuard guard(input.device());
  Tensor output = at::empty_like(input), mask = at::empty_like(input, input.options().dtype(at::kBool));
  auto generator = drawn_from(std::nullopt, input.device());
  bool drops = train.value_or(true) && p > 0;
  enqueue("native_dropout", [from = on_host(input), to = on_host(output), kept = on_host(mask), generator, p, drops] {
    Tensor noise = at::ones_like(from);
    if (drops) noise.bernoulli_(1 - p, generator);
    kept.copy_(noise != 0);
    if (drops) noise.div_(1 - p);
    to.copy_(from * noise);
  });
  return {output, mask};
}

Tensor dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  c10::cuda::CUDAGuard guard(gradient.device());
  Tensor output = at::empty_like(gradient);
  enqueue("native_dropout_backward", [from = on_host(gradient), kept = on_host(mask), to = on_host(output), scale] {
    to.copy_(from * kept.to(from.scalar_type()).mul_(scale));
  });
  return output;
}

// One call of fused attention: as the CPU's fused kernel where that computes it, otherwise by its formula, as on the CPU.
struct Attention {
  Tensor query, key, value, bias;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool by_formula;  // there is dropout, or the bias learns

  std::optional<Tensor> mask() const { return bias.defined() ? std::optional<Tensor>(bias) : std::nullopt; }

  // Like the CPU's formula and the fused kernels, it rounds nothing but its result to the type of the query.
  Tensor formula(const std::optional<at::Generator>& generator) const {
    double root = std::sqrt(scale.value_or(1 / std::sqrt((double)query.size(-1))));
    at::ScalarType wide = at::promote_types(query.scalar_type(), at::kFloat);
    Tensor weights = at::matmul(query.to(wide) * root, key.to(wide).transpose(-2, -1) * root);
    if (is_causal) {
      Tensor allowed = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
      weights = weights.masked_fill(allowed.logical_not(), -std::numeric_limits<double>::infinity());
    }
    if (bias.defined()) weights = weights + bias;
    weights = at::_safe_softmax(weights, -1);
    if (dropout_p > 0) weights = weights * at::empty_like(weights).bernoulli_(1 - dropout_p, generator).div_(1 - dropout_p);
    return at::matmul(weights, value.to(wide)).to(query.scalar_type());
  }
};

Attention attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, double p, bool causal, std::optional<double> scale) {
  bool learns = bias.defined() && bias.requires_grad();
  return {on_host(query), on_host(key), on_host(value), on_host(bias), p, causal, scale, p > 0 || learns};
}

// Queue the forward of `call`. The seed of its dropout is kept in `seed`, from which the backward draws the same numbers.
void attend(const Attention& call, const Tensor& output, const Tensor& sums, const Tensor& seed) {
  auto generator = drawn_from(std::nullopt, output.device());
  enqueue("attention", [call, generator, to = on_host(output), sums = on_host(sums), seed = on_host(seed)] {
    if (call.dropout_p > 0) seed.reshape(-1)[0].copy_(at::scalar_tensor((int64_t)generator.current_seed(), at::kLong).to(seed.scalar_type()));
    if (call.by_formula) {
      to.copy_(call.formula(generator));
      return;
    }
    auto [result, logarithms] = at::_scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, 0.0, call.is_causal, call.mask(), call.scale);
    to.copy_(result);
    if (sums.size(-1) >= logarithms.size(-1)) sums.narrow(-1, 0, logarithms.size(-1)).copy_(logarithms);
  });
}

void attend_backward(
    const Attention& call, const Tensor& gradient, const Tensor& output, const Tensor& sums, const Tensor& seed, std::vector<Tensor> results) {
  std::vector<Tensor> to;
  for (const Tensor& each : results) to.push_back(on_host(each));
  enqueue("attention backward", [call, to, from = on_host(gradient), output = on_host(output), sums = on_host(sums), seed = on_host(seed)] {
    std::vector<Tensor> found;
    if (call.dropout_p > 0 || (to.size() > 3 && to[3].defined())) {
      c10::impl::ForceDispatchKeyGuard normal{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
      at::AutoGradMode enabled(true);
      Attention again = call;
      for (Tensor* each : {&again.query, &again.key, &again.value, &again.bias})
        if (each->defined()) *each = each->detach().requires_grad_();
      std::optional<at::Generator> generator;
      if (call.dropout_p > 0) generator = at::make_generator<at::CPUGeneratorImpl>((uint64_t)seed.reshape(-1)[0].to(at::kLong).item<int64_t>());
      Tensor result = again.formula(generator);
      result.backward(from);
      for (Tensor* each : {&again.query, &again.key, &again.value, &again.bias}) found.push_back(each->defined() ? each->grad() : Tensor());
    } else {
      Tensor logarithms = sums.narrow(-1, 0, call.query.size(-2)).transpose(1, 2).contiguous().transpose(1, 2);
      auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          from, call.query, call.key, call.value, output, logarithms, 0.0, call.is_causal, call.mask(), call.scale);
      found = {query, key, value};
    }
    for (size_t i = 0; i < found.size() && i < to.size(); ++i)
      if (to[i].defined()) to[i].copy_(found[i]);
  });
}

// The fused attention that torch takes for float32 on a GPU, or where there is a mask.
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, bool keep, double p, bool causal, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  int64_t length = (query.size(2) + 31) / 32 * 32;
  Tensor output = allocated({query.size(0), query.size(2), query.size(1), value.size(3)}, query).transpose(1, 2);
  Tensor sums = allocated({query.size(0), query.size(1), keep ? length : 0}, query, at::kFloat);
  Tensor seed = allocated({}, query, at::kLong), offset = allocated({}, query, at::kLong);
  attend(attention(query, key, value, bias.value_or(Tensor()), p, causal, scale), output, sums, seed);
  return {output, sums, seed, offset};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& output, const Tensor& sums,
    const Tensor& seed, const Tensor&, double p, std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  std::vector<Tensor> results;
  const Tensor* of[] = {&query, &key, &value, &bias};
  for (int i = 0; i < 4; ++i) results.push_back(wanted[i] && of[i]->defined() ? at::empty_like(*of[i]) : Tensor());
  attend_backward(attention(query, key, value, bias, p, causal, scale), gradient, output, sums, seed, results);
  return {results[0], results[1], results[2], results[3]};
}

// The one that it takes for bfloat16 and float16.
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, double p, bool causal, bool, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  Tensor output = allocated({query.size(0), query.size(2), query.size(1), value.size(3)}, query).transpose(1, 2);
  Tensor sums = allocated({query.size(0), query.size(1), query.size(2)}, query, at::kFloat);
  Tensor state = allocated({2}, query, at::kUInt64), unused = allocated({}, query, at::kUInt64);
  attend(attention(query, key, value, Tensor(), p, causal, scale), output, sums, state);
  return {output, sums, Tensor(), Tensor(), query.size(2), key.size(2), state, unused, allocated({0}, query)};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output, const Tensor& sums, const Tensor&,
    const Tensor&, c10::SymInt, c10::SymInt, double p, bool causal, const Tensor& state, const Tensor&, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  std::vector<Tensor> results{at::empty_like(query), at::empty_like(key), at::empty_like(value)};
  attend_backward(attention(query, key, value, Tensor(), p, causal, scale), gradient, output, sums, state, results);
  return {results[0], results[1], results[2]};
}

// Operators that allocate, or look at memory, and need no kernel.
const std::set<std::string> OF_TORCH = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Tensor",
    "aten::set_.source_Storage_storage_offset", "aten::record_stream", "aten::_local_scalar_dense", "aten::is_set_to", "aten::_pin_memory",
    "aten::is_pinned", "aten::_efficientzerotensor", "aten::copy_", "aten::_fused_sdp_choice", "aten::_resize_output_",
    "aten::native_dropout", "aten::native_dropout_backward"};

// Operators without a kernel of CUDA's own, whose choice among several would take one that is not simulated.
const char* const WHOLE[] = {"aten::convolution", "aten::convolution_backward"};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

struct Kernels {
  torch::Library library{torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__};
  void add(const c10::OperatorName& name) {
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
  }
  Kernels() {
    struct Silent : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } silent;
    auto* before = c10::WarningUtils::get_warning_handler();
    c10::WarningUtils::set_warning_handler(&silent);  // each says that a kernel is replaced
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) || OF_TORCH.count(toString(name))) continue;
      auto op = dispatcher.findOp(name);
      if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(DispatchKey::CUDA) || is_view(op->schema())) continue;
      if (op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) add(name);
    }
    for (const char* name : WHOLE) add({name, ""});
    library.impl("copy_", &copy_);
    library.impl("native_dropout", &dropout);
    library.impl("native_dropout_backward", &dropout_backward);
    library.impl("_scaled_dot_product_efficient_attention", &efficient_attention);
    library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_attention_backward);
    library.impl("_scaled_dot_product_flash_attention", &flash_attention);
    library.impl("_scaled_dot_product_flash_attention_backward", &flash_attention_backward);
    c10::WarningUtils::set_warning_handler(before);
  }
};
}  // namespace

extern "C" {
// Replace torch's kernels for CUDA in this process.
void simulated_kernels() { static auto& kernels = *new Kernels; }
// Write the operators that were computed to `file`, a line each: its calls and its name.
void simulated_operators(const char* file) {
  std::lock_guard<std::mutex> guard(counted);
  if (FILE* to = fopen(file, "w")) {
    for (auto& [name, calls] : counts) fprintf(to, "%ld %s\n", calls, name.c_str());
    fclose(to);
  }
}
}
