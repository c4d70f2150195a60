/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/image.h"

#include <elf.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define WRAPPER_MAGIC 0x466243b1u /* fatBinaryCtl.h: what compilers put around a fat binary in a program */
#define FAT_MAGIC 0xba55ed50u

struct wrapper {
	uint32_t magic, version;
	const void *fat_binary;
	const void *more;
};

struct fat_binary {
	uint32_t magic;
	uint16_t version, header_bytes;
	uint64_t bytes; /* behind the header */
};

static uint64_t elf_bytes(const Elf64_Ehdr *elf)
{
	uint64_t sections = elf->e_shoff + (uint64_t)elf->e_shnum * elf->e_shentsize;
	uint64_t segments = elf->e_phoff + (uint64_t)elf->e_phnum * elf->e_phentsize;

	return sections > segments ? sections : segments; /* one of the tables is the last of a cubin */
}

uint64_t aq_image_bytes(const void *image)
{
	uint32_t magic;
	struct fat_binary fat;
	struct wrapper wrapper;
	Elf64_Ehdr elf;

	if (!strncmp(image, ELFMAG, SELFMAG)) {
		memcpy(&elf, image, sizeof(elf));
		return elf_bytes(&elf);
	}
	if (strnlen(image, sizeof(magic)) < sizeof(magic))
		return strlen(image);
	memcpy(&magic, image, sizeof(magic));
	if (magic == WRAPPER_MAGIC) {
		memcpy(&wrapper, image, sizeof(wrapper));
		return aq_image_bytes(wrapper.fat_binary);
	}
	if (magic != FAT_MAGIC)
		return strlen(image);
	memcpy(&fat, image, sizeof(fat));
	return fat.header_bytes + fat.bytes;
}

uint64_t aq_image_file_bytes(const char *path)
{
	int file = open(path, O_RDONLY | O_CLOEXEC);

	if (file < 0)
		return 0;
	off_t end = lseek(file, 0, SEEK_END);
	close(file);
	return end > 0 ? (uint64_t)end : 0;
}
