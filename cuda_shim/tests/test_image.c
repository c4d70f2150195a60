/* SPDX-License-Identifier: Apache-2.0 */
/* The size of code as it comes: text, a cubin, a fat binary and its wrapper, a file. */
#include <elf.h>
#include <string.h>

#include "interpose/image.h"
#include "tests/support.h"

#define TEXT ".version 8.0\n.visible .entry work()\n{ ret; }\n"

static void text_size_includes_its_zero(void)
{
	CHECK(aq_image_bytes(TEXT) == strlen(TEXT));
	CHECK(aq_image_bytes("//") == 2);
	CHECK(aq_image_bytes("") == 0);
}

static void a_cubin_ends_with_its_last_table(void)
{
	Elf64_Ehdr elf = { .e_ident = { ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3 }, .e_shoff = 1000, .e_shnum = 3, .e_shentsize = 64 };

	CHECK(aq_image_bytes(&elf) == 1000 + 3 * 64);
	elf.e_phoff = 5000;
	elf.e_phnum = 2;
	elf.e_phentsize = 56;
	CHECK(aq_image_bytes(&elf) == 5000 + 2 * 56);
}

static void fat_binary_size_is_read_inside_a_wrapper(void)
{
	struct {
		uint32_t magic;
		uint16_t version, header_bytes;
		uint64_t bytes;
	} fat = { 0xba55ed50u, 1, 16, 4096 };
	struct {
		uint32_t magic, version;
		const void *fat_binary, *more;
	} wrapper = { 0x466243b1u, 1, &fat, NULL };

	CHECK(aq_image_bytes(&fat) == 16 + 4096);
	CHECK(aq_image_bytes(&wrapper) == 16 + 4096);
}

static void file_size_is_its_length(void)
{
	support_directory();
	support_write_region();
	CHECK(aq_image_file_bytes(support_region()) == AQ_REGION_BYTES);
	support_remove();
	CHECK(aq_image_file_bytes(support_region()) == 0);
}

int main(void)
{
	text_size_includes_its_zero();
	a_cubin_ends_with_its_last_table();
	fat_binary_size_is_read_inside_a_wrapper();
	file_size_is_its_length();
	return 0;
}
