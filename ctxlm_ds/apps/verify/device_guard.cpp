// A CUDA device without CUDA: autograd's engine and FakeTensorMode carry "cuda" tensors on a CPU build of torch.
// device_guard.py compiles this file and loads it before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

const Device kOnly(DeviceType::CUDA, 0);

// One device and one stream, on which nothing ever runs.
struct OneDevice final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kOnly; }
  Device getDevice() const override { return kOnly; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kOnly); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)

// The registry's key is the name of the class.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasCuDNN() const override { return false; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// Before those of a CUDA build, which finds no driver on a machine without a GPU.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace
