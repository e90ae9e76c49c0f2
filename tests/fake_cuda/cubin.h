// What a kernel takes of a multiprocessor, from its cubin. ptxas writes it into the section .nv.info: entries of a format (one byte),
// a name (one byte) and a size (two bytes), then that many bytes.
#pragma once

#include <elf.h>

#include <cstdint>
#include <cstring>

struct Resources {
  int registers = 32;  // a thread
  int local = 0;       // bytes a thread: what is spilled lies there
};

// The resources of the only kernel of a cubin; those of a small kernel for anything else.
inline Resources resources_of(const void* image) {
  constexpr uint8_t kSized = 4, kRegisters = 0x2f, kFrame = 0x11;
  Resources found;
  const char* file = (const char*)image;
  if (memcmp(file, ELFMAG, SELFMAG)) return found;
  const Elf64_Ehdr& header = *(const Elf64_Ehdr*)file;
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(file + header.e_shoff);
  const char* names = file + sections[header.e_shstrndx].sh_offset;
  for (int i = 0; i < header.e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info")) continue;
    const char* at = file + sections[i].sh_offset;
    const char* end = at + sections[i].sh_size;
    while (at + 12 <= end) {  // the bytes are the number of a symbol, and a value
      uint8_t format = at[0], name = at[1];
      uint16_t size;
      int32_t value;
      memcpy(&size, at + 2, sizeof size);
      memcpy(&value, at + 8, sizeof value);
      if (format == kSized && name == kRegisters) found.registers = value;
      if (format == kSized && name == kFrame) found.local = value;
      at += format == kSized ? 4 + size : 4;
    }
  }
  return found;
}
