// A CUDA device for a build of torch that has none, as far as fake tensors need one: they carry a device and no memory,
// so nothing is ever launched. Autograd asks a device guard for streams and events, and the hooks whether a GPU exists;
// both are answered here. tests/rehearsal/fake_cuda.py compiles and loads this before torch is imported.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceType CUDA = DeviceType::CUDA;

// One device, whose one stream has always finished.
struct IdleGuard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return Device(CUDA, 0); }
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }

  // An event needs an address that is not null, since torch takes null for one that was never recorded.
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = &mark; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}

  inline static char mark = 0;
};

IdleGuard guard;
c10::impl::DeviceGuardImplRegistrar registrar(CUDA, &guard);

// Torch looks its hooks up under this very name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
