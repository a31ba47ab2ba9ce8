// What PyTorch's C++ asks of a CUDA device, for one without a driver: a guard, hooks, and a pinned allocator that
// remembers its memory. Tensors and streams are those of fake_cuda.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device device(c10::kCUDA, 0);

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* begin = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (begin) {
      std::lock_guard<std::mutex> hold(mutex);
      ends[static_cast<char*>(begin)] = static_cast<char*>(begin) + bytes;
    }
    return {begin, begin, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  static bool holds(const void* address) {
    std::lock_guard<std::mutex> hold(mutex);
    auto next = ends.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    return next != ends.begin() && address < (--next)->second;
  }

 private:
  static void release(void* begin) {
    std::lock_guard<std::mutex> hold(mutex);
    ends.erase(static_cast<char*>(begin));
    std::free(begin);
  }
  static inline std::mutex mutex;
  static inline std::map<char*, char*> ends;
} pinned_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, device); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::holds(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
