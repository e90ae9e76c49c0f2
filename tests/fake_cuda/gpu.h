// The GPU that the runtime and the driver say they have, by its compute capability. FAKE_CUDA_CAPABILITY=80 chooses another one
// than 90. Compilers choose kernels by these numbers.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

struct Gpu {
  const char* capability;
  int multiprocessors;
  int threads, blocks;         // a multiprocessor
  int shared;                  // memory a multiprocessor, bytes
  int l2;                      // MiB
  int bus;                     // bits
  int clock, memory_clock;     // kHz

  int major() const { return atoi(capability) / 10; }
  int minor() const { return atoi(capability) % 10; }
  int shared_by_request() const { return shared - 1024; }  // a block
};

inline const Gpu& gpu() {
  static const Gpu known[] = {
      {"80", 108, 2048, 32, 164 << 10, 40, 5120, 1410000, 1215000},   // A100
      {"89", 128, 1536, 24, 100 << 10, 72, 384, 2520000, 10501000},   // RTX 4090
      {"90", 132, 2048, 32, 228 << 10, 50, 5120, 1980000, 2619000},   // H100
      {"100", 148, 2048, 32, 228 << 10, 126, 8192, 1965000, 3996000}, // B200
  };
  const char* wanted = getenv("FAKE_CUDA_CAPABILITY");
  if (!wanted) wanted = "90";
  for (const Gpu& one : known)
    if (!strcmp(one.capability, wanted)) return one;
  fprintf(stderr, "FAKE_CUDA_CAPABILITY=%s is no GPU of gpu.h\n", wanted);
  abort();
}
