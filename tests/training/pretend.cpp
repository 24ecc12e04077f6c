// A CUDA device for a torch that was built without one: its memory is the process's own, its kernels are the CPU's, and
// all is done at once. What a GPU refuses is refused: tensors of two devices in one operator, and CPU tensors, or those
// of another GPU, in an NCCL collective. Streams, speed and what they hide are not shown by it.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>
#include <unordered_set>
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Size = c10::IntArrayRef;
template <class T> using Maybe = std::optional<T>;

namespace {
int64_t held = 0, peak = 0, reads = 0;
c10::DeviceIndex current = 0;
std::unordered_set<const void*> pinned;

struct Memory : c10::Allocator {
  struct Block { void* data; int64_t size; bool pin; };
  const bool pin;
  explicit Memory(bool pin) : pin(pin) {}
  static void drop(void* raw) {
    std::unique_ptr<Block> block(static_cast<Block*>(raw));
    if (block->pin) pinned.erase(block->data); else held -= block->size;
    free(block->data);
  }
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{malloc(size + 1), int64_t(size), pin};
    if (pin) pinned.insert(block->data); else peak = std::max(peak, held += block->size);
    return {block->data, block, &drop, pin ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
Memory gpu(false), host(true);
}  // namespace

namespace at {
namespace accelerator {  // stands in for torch's own, which finds none: this library is loaded before it
Maybe<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
}  // namespace accelerator
struct Hooks : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return pinned.count(data) > 0; }
  Allocator* getPinnedMemoryAllocator() const override { return &host; }
};
}  // namespace at

namespace {
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct On {  // memory comes from the GPU that was asked for
  c10::DeviceIndex before = current;
  explicit On(Maybe<c10::Device> d) { if (d && d->has_index()) current = d->index(); }
  ~On() { current = before; }
};
const c10::DispatchKeySet cuda(c10::DispatchKey::CUDA);
Tensor empty(Size size, Maybe<c10::ScalarType> type, Maybe<c10::Layout>, Maybe<c10::Device> device, Maybe<bool>,
             Maybe<c10::MemoryFormat> format) {
  On on(device);
  return at::detail::empty_generic(size, &gpu, cuda, c10::dtype_or_default(type), format);
}
Tensor strided(Size size, Size stride, Maybe<c10::ScalarType> type, Maybe<c10::Layout>, Maybe<c10::Device> device,
               Maybe<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(size, stride, &gpu, cuda, c10::dtype_or_default(type));
}
Tensor seen(const Tensor& t) {  // the same memory as a CPU tensor
  if (!t.defined() || t.is_cpu()) return t;
  auto out = at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(c10::kCPU));
  out.storage().unsafeGetStorageImpl()->set_allocator(c10::GetCPUAllocator());
  out.storage().unsafeGetStorageImpl()->set_resizable(true);
  return out;
}
Tensor& copy_(Tensor& self, const Tensor& from, bool) {
  if (self.numel()) seen(self).copy_(seen(from));
  return self;
}
void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = op.schema().name();
  const bool mixes = name == "aten::index" || name.find("index_put") != std::string::npos;  // indices of the CPU
  std::vector<std::pair<Tensor, Tensor>> given;
  Maybe<c10::Device> device;
  auto in = [&](const Tensor& t) {
    if (t.defined() && t.is_cuda()) device = t.device();
    TORCH_CHECK(mixes || !t.defined() || !t.is_cpu() || !t.dim(), name, ": tensors are on cuda and cpu");
    given.emplace_back(t, seen(t));
    return given.back().second;
  };
  auto out = [&](const Tensor& t) {
    for (auto& [ours, theirs] : given)
      if (t.defined() && theirs.is_same(t)) return ours;
    return t.defined() ? t.to(device.value_or(c10::Device(c10::kCUDA, current))) : t;
  };
  auto each = [](size_t count, torch::jit::Stack* stack, auto change) {
    for (auto& value : torch::jit::last(*stack, count)) {
      auto& v = const_cast<c10::IValue&>(value);
      if (v.isTensor()) v = change(v.toTensor());
      else if (v.isTensorList()) { c10::List<Tensor> l; for (const Tensor& t : v.toTensorVector()) l.push_back(change(t)); v = l; }
      else if (v.isOptionalTensorList()) {
        c10::List<Maybe<Tensor>> l;
        for (Maybe<Tensor> t : v.toOptionalTensorList()) l.push_back(t ? Maybe<Tensor>(change(*t)) : t);
        v = l;
      } else if (v.isDevice()) v = c10::Device(c10::kCPU);
    }
  };
  each(op.schema().arguments().size(), stack, in);
  reads += name == "aten::_local_scalar_dense";
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [ours, theirs] : given)
    if (ours.defined() && ours.is_cuda() && ours.data_ptr() != theirs.data_ptr())  // it was resized
      at::native::resize_(ours, theirs.sizes(), {}).copy_(theirs);
  each(op.schema().returns().size(), stack, out);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", strided);
  m.impl("copy_", copy_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

struct Clock : c10d::Timer {
  explicit Clock(c10::Device) {}
  Maybe<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
struct Done : c10d::Work {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  explicit Done(Tensors out) : future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {
    future->markCompleted(c10::IValue(std::move(out)));
  }
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};
Tensors sent(const Tensors& tensors) {
  Tensors out;
  for (const auto& t : tensors) {
    TORCH_CHECK(t.is_cuda() && t.get_device() == current && t.is_contiguous(), "NCCL: not a dense tensor of this GPU");
    TORCH_CHECK(!t.is_complex(), "NCCL: no such type");
    out.push_back(seen(t));
  }
  return out;
}
struct Nccl : c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Nccl(const c10::intrusive_ptr<c10d::Backend>& gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  Work done(const Work& work, Tensors out) { work->wait(); return c10::make_intrusive<Done>(std::move(out)); }
  Work broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { auto h = sent(t); return done(gloo->broadcast(h, o), t); }
  Work allreduce(Tensors& t, const c10d::AllreduceOptions& o) override { auto h = sent(t); return done(gloo->allreduce(h, o), t); }
  Work allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    std::vector<Tensors> a{sent(to[0])};
    auto b = sent(from);
    return done(gloo->allgather(a, b, o), to[0]);
  }
  Work _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    auto a = sent({to})[0], b = sent({from})[0];
    return done(gloo->_allgather_base(a, b, o), {to});
  }
  Work allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    auto a = sent(to), b = sent(from);
    return done(gloo->allgather_into_tensor_coalesced(a, b, o), to);
  }
  Work _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override {
    auto a = sent({to})[0], b = sent({from})[0];
    return done(gloo->_reduce_scatter_base(a, b, o), {to});
  }
};
}  // namespace

namespace c10d {
using Clock = ::Clock;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Clock)
}  // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(c10::kCUDA, &gpu);
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) at::Hooks;  // they hold no data
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(m, "Nccl").def(py::init<const c10::intrusive_ptr<c10d::Backend>&>());
  m.def("peak", [] { return peak; });
  m.def("reset", [] { peak = held; });
  m.def("reads", [] { return reads; });
  m.def("device", [] { return int(current); });
  m.def("set_device", [](int index) { current = c10::DeviceIndex(index); });
  m.def("resize", [](py::handle s, size_t n) { at::native::resize_bytes_cpu(THPStorage_Unpack(s.ptr()).unsafeGetStorageImpl(), n); });
}
