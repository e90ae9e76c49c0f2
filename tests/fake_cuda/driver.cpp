// libcuda.so.1 for runtime.cpp: the calls of the CUDA driver that PyTorch and Triton make. Modules and functions are handles of what
// a kernel takes, and launches are counted there. A function that is missing here is missing in cudaGetDriverEntryPointByVersion as well.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "cubin.h"
#include "gpu.h"

typedef int Result;
typedef void* Handle;

namespace {

struct Launch {  // the beginning of CUlaunchConfig
  unsigned blocks[3], threads[3], shared;
  Handle stream;
};

constexpr Result kSuccess = 0, kNotFound = 500, kNotSupported = 801;
int context;

Result launched(Handle stream) {
  static auto launch = (Result (*)(Handle))dlsym(RTLD_DEFAULT, "fake_launch");
  return launch ? launch(stream) : kSuccess;
}

}  // namespace

extern "C" {

Result cuInit(unsigned) { return kSuccess; }
Result cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
Result cuGetErrorString(Result, const char** text) { return *text = "an error of the driver", kSuccess; }
Result cuGetErrorName(Result, const char** text) { return *text = "CUDA_ERROR", kSuccess; }
Result cuGetProcAddress(const char*, Handle* function, int, uint64_t) { return *function = nullptr, kNotFound; }

Result cuGetProcAddress_v2(const char*, Handle* function, int, uint64_t, int* status) {
  *function = nullptr;
  if (status) *status = 1;
  return kNotFound;
}

Result cuGetExportTable(const void** table, const void*) { return *table = nullptr, kNotFound; }

// ---- devices and contexts -----------------------------------------------------------------------------------------------------

Result cuDeviceGet(int* device, int index) { return *device = index, kSuccess; }

Result cuDeviceGetCount(int* number) {
  const char* given = getenv("FAKE_CUDA_DEVICES");
  return *number = given ? atoi(given) : 1, kSuccess;
}

Result cuDeviceGetUuid(Handle uuid, int device) { return memset(uuid, device + 1, 16), kSuccess; }
Result cuDeviceGetUuid_v2(Handle uuid, int device) { return cuDeviceGetUuid(uuid, device); }
Result cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "GPU without kernels"), kSuccess; }

Result cuDeviceGetAttribute(int* value, int attribute, int) {  // the numbers are those of CUdevice_attribute
  switch (attribute) {
    case 1: *value = 1024; break;     // threads a block
    case 8: *value = 49152; break;    // shared memory a block
    case 10: *value = 32; break;      // threads a warp
    case 12: case 82: *value = 65536; break;  // registers a block, a multiprocessor
    case 13: *value = gpu().clock; break;
    case 16: *value = gpu().multiprocessors; break;
    case 36: *value = gpu().memory_clock; break;
    case 37: *value = gpu().bus; break;
    case 39: *value = gpu().threads; break;
    case 75: *value = gpu().major(); break;
    case 76: *value = gpu().minor(); break;
    case 81: *value = gpu().shared; break;
    case 97: *value = gpu().shared_by_request(); break;
    default: *value = 1;
  }
  return kSuccess;
}

Result cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  static auto contexts = (unsigned (*)())dlsym(RTLD_DEFAULT, "fake_contexts");
  *flags = 0;
  *active = contexts ? contexts() >> device & 1 : 1;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Handle* handle, int) { return *handle = &context, kSuccess; }
Result cuCtxGetCurrent(Handle* handle) { return *handle = &context, kSuccess; }
Result cuCtxGetDevice(int* device) { return *device = 0, kSuccess; }
Result cuCtxGetDevice_v2(int* device) { return *device = 0, kSuccess; }
Result cuCtxSetCurrent(Handle) { return kSuccess; }
Result cuCtxPushCurrent(Handle) { return kSuccess; }
Result cuCtxPushCurrent_v2(Handle) { return kSuccess; }
Result cuCtxPopCurrent(Handle* handle) { return *handle = &context, kSuccess; }
Result cuCtxPopCurrent_v2(Handle* handle) { return *handle = &context, kSuccess; }
Result cuCtxGetLimit(size_t* value, int) { return *value = 1024, kSuccess; }
Result cuCtxSetLimit(int, size_t) { return kSuccess; }

Result cuPointerGetAttribute(Handle value, int attribute, unsigned long long address) {
  if (attribute == 2) *(int*)value = 2;  // the memory is of a device
  else if (attribute == 3 || attribute == 4) *(unsigned long long*)value = address;
  else *(int*)value = 1;
  return kSuccess;
}

Result cuPointerGetAttributes(unsigned, int*, Handle*, unsigned long long) { return kSuccess; }

// ---- modules and launches -----------------------------------------------------------------------------------------------------

Result cuModuleLoad(Handle* module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> image{std::istreambuf_iterator<char>(file), {}};
  if (image.size() < sizeof(Elf64_Ehdr)) return kNotFound;
  return *module = new Resources(resources_of(image.data())), kSuccess;
}

Result cuModuleLoadData(Handle* module, const void* image) { return *module = new Resources(resources_of(image)), kSuccess; }
Result cuModuleLoadDataEx(Handle* module, const void* image, unsigned, Handle, Handle) { return cuModuleLoadData(module, image); }
Result cuModuleUnload(Handle) { return kSuccess; }
Result cuModuleGetFunction(Handle* function, Handle module, const char*) { return *function = module, kSuccess; }
Result cuFuncGetModule(Handle* module, Handle function) { return *module = function, kSuccess; }
Result cuFuncLoad(Handle) { return kSuccess; }
Result cuFuncSetAttribute(Handle, int, int) { return kSuccess; }
Result cuFuncSetCacheConfig(Handle, int) { return kSuccess; }

Result cuFuncGetAttribute(int* value, int attribute, Handle function) {
  const Resources& taken = *(const Resources*)function;
  *value = attribute == 0 ? 1024 : attribute == 3 ? taken.local : attribute == 4 ? taken.registers : 0;  // 0: threads a block
  return kSuccess;
}

Result cuLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle stream, Handle*, Handle*) {
  return launched(stream);
}

Result cuLaunchCooperativeKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle stream, Handle*) {
  return launched(stream);
}

Result cuLaunchKernelEx(const Launch* launch, Handle, Handle*, Handle*) { return launched(launch->stream); }
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* number, Handle, int, size_t) { return *number = 2, kSuccess; }
Result cuOccupancyMaxActiveClusters(int* number, Handle, Handle) { return *number = 2, kSuccess; }
Result cuTensorMapEncodeTiled() { return kSuccess; }
Result cuTensorMapEncodeIm2col() { return kSuccess; }

// PyTorch looks these up when it loads, and refuses to load without one of them.
#define NOT_SUPPORTED(name) \
  Result name() { return kNotSupported; }
NOT_SUPPORTED(cuCtxFromGreenCtx) NOT_SUPPORTED(cuDevResourceGenerateDesc) NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuDeviceGetDevResource) NOT_SUPPORTED(cuGreenCtxCreate) NOT_SUPPORTED(cuGreenCtxDestroy)
NOT_SUPPORTED(cuGreenCtxRecordEvent) NOT_SUPPORTED(cuGreenCtxStreamCreate) NOT_SUPPORTED(cuLaunchKernelExHandle)
NOT_SUPPORTED(cuLinkAddData_v2) NOT_SUPPORTED(cuLogsRegisterCallback) NOT_SUPPORTED(cuLogsUnregisterCallback)
NOT_SUPPORTED(cuMemAddressFree) NOT_SUPPORTED(cuMemAddressReserve) NOT_SUPPORTED(cuMemCreate)
NOT_SUPPORTED(cuMemExportToShareableHandle) NOT_SUPPORTED(cuMemGetAddressRange) NOT_SUPPORTED(cuMemGetAddressRange_v2)
NOT_SUPPORTED(cuMemGetAllocationGranularity) NOT_SUPPORTED(cuMemGetAllocationPropertiesFromHandle)
NOT_SUPPORTED(cuMemImportFromShareableHandle) NOT_SUPPORTED(cuMemMap) NOT_SUPPORTED(cuMemRelease)
NOT_SUPPORTED(cuMemRetainAllocationHandle) NOT_SUPPORTED(cuMemSetAccess) NOT_SUPPORTED(cuMemUnmap)
NOT_SUPPORTED(cuMemsetD32Async) NOT_SUPPORTED(cuMulticastAddDevice) NOT_SUPPORTED(cuMulticastBindAddr)
NOT_SUPPORTED(cuMulticastBindMem) NOT_SUPPORTED(cuMulticastCreate) NOT_SUPPORTED(cuMulticastGetGranularity)
NOT_SUPPORTED(cuMulticastUnbind) NOT_SUPPORTED(cuStreamWriteValue32) NOT_SUPPORTED(cuStreamWriteValue32_v2)
}
