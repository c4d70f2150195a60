/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image_elf.c - cubins: ELF files of 64 bits for the CUDA machine.
 *
 * Kernels are the function symbols that have the entry bit. A kernel's section .nv.info.NAME lists its attributes (below), .nv.shared.NAME
 * its static shared memory; registers and stack of all kernels are in .nv.info. Variables are the object symbols of .nv.global (zeros),
 * .nv.global.init and .nv.constant3. All that a device needs besides variables is code: instructions and the other constant banks.
 * Function symbols without a section are functions of the driver that the code calls.
 *
 * As read in what ptxas of CUDA 12 (ABI 7) and 13 (ABI 8) writes; cuobjdump -elf prints the same.
 */
#include <elf.h>
#include <stdlib.h>

#include "simulated_driver/image.h"

#ifndef EM_CUDA
#define EM_CUDA 190
#endif
#define OSABI_CUDA_8 0x41
#define ACCELERATOR_ONLY 0x800u     /* in the flags of ABI 7: compiled for sm_90a */
#define ENTRY_SYMBOL 0x10u
#define MANAGED_SYMBOL 0x04u
#define RESERVED_SHARED_BYTES 1024u /* of each block, counted in .nv.shared.NAME since compute capability 9.0 */
#define SHARED_RESERVED_SINCE 90u
#define COMPATIBLE_ACCELERATOR 0x09u /* in .nv.compat: 1: compiled for sm_90a */
#define MOST_ALIGNMENT 256u

enum format { FORMAT_SIZED = 4 };
enum attribute {
	ATTRIBUTE_MAX_THREADS = 0x05,
	ATTRIBUTE_REQUIRED_THREADS = 0x10,
	ATTRIBUTE_FRAME_SIZE = 0x11,
	ATTRIBUTE_PARAMETER = 0x17,
	ATTRIBUTE_REGISTERS = 0x2f,
	ATTRIBUTE_CLUSTER = 0x3d,
	ATTRIBUTE_EXPLICIT_CLUSTER = 0x3e,
	ATTRIBUTE_LARGE_PARAMETER = 0x45, /* where a size needs more than 14 bits */
};

struct elf {
	struct sim_view file, section_names, symbols, symbol_names;
	Elf64_Ehdr header;
	uint64_t n_sections, n_symbols;
	uint32_t capability;
	uint32_t *kernel_of_symbol, *kernel_of_section; /* 1 + index in the image; 0: no kernel */
};

struct attribute_record {
	uint8_t format, attribute;
	uint16_t value;
	struct sim_view data;
};

/* ---- tables ------------------------------------------------------------------------------------------------------------ */

static bool section_at(const struct elf *elf, uint64_t index, Elf64_Shdr *section)
{
	return index < elf->n_sections && sim_view_read(elf->file, elf->header.e_shoff + index * sizeof *section, section, sizeof *section);
}

static bool symbol_at(const struct elf *elf, uint64_t index, Elf64_Sym *symbol)
{
	return index < elf->n_symbols && sim_view_read(elf->symbols, index * sizeof *symbol, symbol, sizeof *symbol);
}

static struct sim_view content_of(const struct elf *elf, const Elf64_Shdr *section)
{
	struct sim_view content = { NULL, 0 };
	if (section->sh_type != SHT_NOBITS)
		sim_view_part(elf->file, section->sh_offset, section->sh_size, &content);
	return content;
}

/* "" where the table has no such name. */
static const char *name_in(struct sim_view table, uint64_t offset)
{
	struct sim_view rest;
	bool is_name = offset < table.length && sim_view_part(table, offset, table.length - offset, &rest) &&
		       memchr(rest.bytes, 0, rest.length);
	return is_name ? (const char *)rest.bytes : "";
}

static const char *section_name(const struct elf *elf, const Elf64_Shdr *section)
{
	return name_in(elf->section_names, section->sh_name);
}

static bool begins_with(const char *text, const char *beginning)
{
	return strncmp(text, beginning, strlen(beginning)) == 0;
}

static bool find_symbols(struct elf *elf)
{
	Elf64_Shdr section, names;
	for (uint64_t i = 0; section_at(elf, i, &section); i++)
		if (section.sh_type == SHT_SYMTAB) {
			elf->symbols = content_of(elf, &section);
			elf->n_symbols = elf->symbols.length / sizeof(Elf64_Sym);
			if (section_at(elf, section.sh_link, &names))
				elf->symbol_names = content_of(elf, &names);
			return true;
		}
	return false;
}

/* Sections lie inside the file. They do not share bytes, so that reading each once is bounded by the file's length. */
static bool sections_are_inside(const struct elf *elf)
{
	Elf64_Shdr section;
	uint64_t bytes = 0;
	for (uint64_t i = 0; section_at(elf, i, &section); i++) {
		if (section.sh_type == SHT_NOBITS || section.sh_type == SHT_NULL || section.sh_size == 0)
			continue;
		if (!content_of(elf, &section).bytes)
			return false;
		bytes += section.sh_size;
	}
	return bytes <= elf->file.length;
}

/* The tables of an executable of this machine. */
static bool open_file(struct elf *elf)
{
	const Elf64_Ehdr *header = &elf->header;
	Elf64_Shdr section;
	if (!sim_view_read(elf->file, 0, &elf->header, sizeof elf->header) || header->e_ident[EI_CLASS] != ELFCLASS64 ||
	    header->e_ident[EI_DATA] != ELFDATA2LSB || header->e_machine != EM_CUDA || header->e_shentsize != sizeof section)
		return false;
	elf->n_sections = header->e_shnum;
	if (!elf->n_sections || !section_at(elf, elf->n_sections - 1, &section) || !section_at(elf, header->e_shstrndx, &section))
		return false;
	elf->section_names = content_of(elf, &section);
	return sections_are_inside(elf) && find_symbols(elf);
}

static bool next_attribute(struct sim_view *list, struct attribute_record *record)
{
	if (!sim_view_read(*list, 0, record, 4))
		return false;
	uint64_t bytes = record->format == FORMAT_SIZED ? record->value : 0;
	return sim_view_part(*list, 4, bytes, &record->data) && sim_view_part(*list, 4 + bytes, list->length - 4 - bytes, list);
}

/* ---- which devices run it ----------------------------------------------------------------------------------------------- */

static bool is_for_accelerator(const struct elf *elf)
{
	Elf64_Shdr section;
	struct attribute_record record;
	if (elf->header.e_ident[EI_OSABI] != OSABI_CUDA_8)
		return elf->header.e_flags & ACCELERATOR_ONLY;
	for (uint64_t i = 0; section_at(elf, i, &section); i++) {
		if (strcmp(section_name(elf, &section), ".nv.compat") != 0)
			continue;
		for (struct sim_view list = content_of(elf, &section); next_attribute(&list, &record);)
			if (record.attribute == COMPATIBLE_ACCELERATOR)
				return (record.value & 0xff) == 1;
	}
	return false;
}

static bool runs_on(struct elf *elf, uint32_t capability)
{
	elf->capability = elf->header.e_ident[EI_OSABI] == OSABI_CUDA_8 ? elf->header.e_flags >> 8 & 0xff : elf->header.e_flags & 0xff;
	if (is_for_accelerator(elf))
		return elf->capability == capability;
	return elf->capability / 10 == capability / 10 && elf->capability <= capability;
}

/* ---- kernels ----------------------------------------------------------------------------------------------------------- */

static struct sim_image_kernel *kernel_at(struct sim_image *out, const uint32_t *map, uint64_t count, uint64_t index)
{
	return index < count && map[index] ? &out->kernels[map[index] - 1] : NULL;
}

static bool add_kernels(struct elf *elf, struct sim_image *out)
{
	Elf64_Sym symbol;
	for (uint64_t i = 0; symbol_at(elf, i, &symbol); i++) {
		const char *name = name_in(elf->symbol_names, symbol.st_name);
		if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_shndx == SHN_UNDEF)
			sim_image_note_call(out, name);
		if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !(symbol.st_other & ENTRY_SYMBOL) || !symbol.st_shndx || !*name ||
		    symbol.st_shndx >= elf->n_sections)
			continue;
		if (!sim_image_add_kernel(out, strdup(name)))
			return false;
		elf->kernel_of_symbol[i] = elf->kernel_of_section[symbol.st_shndx] = out->n_kernels;
	}
	return true;
}

static uint32_t product(struct sim_view numbers)
{
	uint32_t n[3];
	uint64_t all = sim_view_read(numbers, 0, n, sizeof n) ? (uint64_t)n[0] * n[1] : 0;
	return all && all <= 1024 && n[2] <= 1024 && all * n[2] <= 1024 ? (uint32_t)all * n[2] : 0;
}

static bool add_parameter(struct sim_image_kernel *kernel, const struct attribute_record *record)
{
	struct {
		uint32_t index;
		uint16_t ordinal, offset;
		uint32_t size;
	} layout;
	if (!sim_view_read(record->data, 0, &layout, sizeof layout))
		return true;
	uint32_t bytes = record->attribute == ATTRIBUTE_PARAMETER ? layout.size >> 18 : layout.size;
	return sim_image_add_parameter(kernel, (struct sim_image_parameter){ layout.ordinal, layout.offset, bytes });
}

static bool read_kernel_attribute(struct sim_image_kernel *kernel, const struct attribute_record *record)
{
	switch (record->attribute) {
	case ATTRIBUTE_MAX_THREADS:
	case ATTRIBUTE_REQUIRED_THREADS: kernel->max_threads = product(record->data); return true;
	case ATTRIBUTE_CLUSTER: sim_view_read(record->data, 0, kernel->cluster, sizeof kernel->cluster); return true;
	case ATTRIBUTE_EXPLICIT_CLUSTER: kernel->needs_cluster = true; return true;
	case ATTRIBUTE_PARAMETER:
	case ATTRIBUTE_LARGE_PARAMETER: return add_parameter(kernel, record);
	default: return true;
	}
}

static int by_ordinal(const void *a, const void *b)
{
	const struct sim_image_parameter *first = a, *second = b;
	return (first->ordinal > second->ordinal) - (first->ordinal < second->ordinal);
}

static bool read_kernel_attributes(struct sim_image_kernel *kernel, struct sim_view list)
{
	struct attribute_record record;
	while (next_attribute(&list, &record))
		if (!read_kernel_attribute(kernel, &record))
			return false;
	if (kernel->n_parameters)
		qsort(kernel->parameters, kernel->n_parameters, sizeof *kernel->parameters, by_ordinal);
	return true;
}

/* Registers and stack frame, by the kernel's symbol. */
static void read_common_attributes(const struct elf *elf, struct sim_view list, struct sim_image *out)
{
	struct attribute_record record;
	uint32_t pair[2];
	while (next_attribute(&list, &record)) {
		if (!sim_view_read(record.data, 0, pair, sizeof pair))
			continue;
		struct sim_image_kernel *kernel = kernel_at(out, elf->kernel_of_symbol, elf->n_symbols, pair[0]);
		if (kernel && record.attribute == ATTRIBUTE_REGISTERS)
			kernel->registers = pair[1];
		else if (kernel && record.attribute == ATTRIBUTE_FRAME_SIZE)
			kernel->local_bytes = pair[1];
	}
}

static uint32_t static_shared_bytes(const struct elf *elf, uint64_t section_bytes)
{
	uint32_t bytes = section_bytes < UINT32_MAX ? (uint32_t)section_bytes : UINT32_MAX;
	bool reserves = elf->capability >= SHARED_RESERVED_SINCE && bytes >= RESERVED_SHARED_BYTES;
	return reserves ? bytes - RESERVED_SHARED_BYTES : bytes;
}

static bool is_variables(const char *name)
{
	return strcmp(name, ".nv.global") == 0 || strcmp(name, ".nv.global.init") == 0 || strcmp(name, ".nv.constant3") == 0;
}

static bool read_section(const struct elf *elf, const Elf64_Shdr *section, struct sim_image *out)
{
	const char *name = section_name(elf, section);
	struct sim_image_kernel *kernel = kernel_at(out, elf->kernel_of_section, elf->n_sections, section->sh_info);
	if (strcmp(name, ".nv.info") == 0)
		read_common_attributes(elf, content_of(elf, section), out);
	else if (kernel && begins_with(name, ".nv.info."))
		return read_kernel_attributes(kernel, content_of(elf, section));
	else if (kernel && begins_with(name, ".nv.shared."))
		kernel->shared_bytes = static_shared_bytes(elf, section->sh_size);
	else if (section->sh_flags & SHF_ALLOC && section->sh_type != SHT_NOBITS && !is_variables(name))
		out->code_bytes += section->sh_size;
	return true;
}

static bool read_sections(const struct elf *elf, struct sim_image *out)
{
	Elf64_Shdr section;
	for (uint64_t i = 0; section_at(elf, i, &section); i++)
		if (!read_section(elf, &section, out))
			return false;
	return true;
}

/* ---- variables --------------------------------------------------------------------------------------------------------- */

/* Behind what lies in the block, as far as the symbol's own address was aligned. */
static uint64_t place_in(struct sim_image_block *block, uint64_t address, uint64_t bytes)
{
	uint64_t alignment = address ? address & -address : MOST_ALIGNMENT;
	alignment = alignment < MOST_ALIGNMENT ? alignment : MOST_ALIGNMENT;
	uint64_t offset = (block->bytes + alignment - 1) / alignment * alignment;
	block->bytes = offset + bytes;
	return offset;
}

/* False also where symbols share bytes, and together have more than `most`. */
static bool set_initial(struct sim_image_block *block, uint64_t offset, struct sim_view content, uint64_t most)
{
	uint8_t *grown = offset + content.length > most ? NULL : realloc(block->initial, offset + content.length);
	if (!grown)
		return false;
	memset(grown + block->initial_bytes, 0, offset - block->initial_bytes); /* the gap that alignment leaves */
	memcpy(grown + offset, content.bytes, content.length);
	block->initial = grown;
	block->initial_bytes = offset + content.length;
	return true;
}

/* The shared blocks of a context: one for variables that have a value, one for those that begin as zeros. */
struct blocks {
	uint32_t with_value, of_zeros;
};

static uint32_t block_for(struct sim_image *out, struct blocks *blocks, bool is_managed, bool has_value)
{
	uint32_t *shared = has_value ? &blocks->with_value : &blocks->of_zeros;
	if (is_managed)
		return sim_image_add_block(out, true);
	if (*shared == UINT32_MAX)
		*shared = sim_image_add_block(out, false);
	return *shared;
}

static bool add_variable(const struct elf *elf, const Elf64_Sym *symbol, struct blocks *blocks, struct sim_image *out)
{
	Elf64_Shdr section;
	struct sim_view value = { NULL, 0 };
	const char *name = name_in(elf->symbol_names, symbol->st_name);
	if (ELF64_ST_TYPE(symbol->st_info) != STT_OBJECT || !*name || !symbol->st_size || symbol->st_size > UINT64_MAX / 4 ||
	    !section_at(elf, symbol->st_shndx, &section) || !is_variables(section_name(elf, &section)))
		return true;
	bool has_value = sim_view_part(content_of(elf, &section), symbol->st_value, symbol->st_size, &value);
	uint32_t block = block_for(out, blocks, symbol->st_other & MANAGED_SYMBOL, has_value);
	struct sim_image_variable *variable = block == UINT32_MAX ? NULL : sim_image_add_variable(out, strdup(name), symbol->st_size);
	if (!variable || out->blocks[block].bytes > UINT64_MAX / 4)
		return variable != NULL;
	variable->block = block;
	variable->offset = place_in(&out->blocks[block], symbol->st_value, symbol->st_size);
	return !has_value || set_initial(&out->blocks[block], variable->offset, value, elf->file.length * 2);
}

static bool add_variables(const struct elf *elf, struct sim_image *out)
{
	struct blocks blocks = { UINT32_MAX, UINT32_MAX };
	Elf64_Sym symbol;
	for (uint64_t i = 0; symbol_at(elf, i, &symbol); i++)
		if (!add_variable(elf, &symbol, &blocks, out))
			return false;
	return true;
}

CUresult sim_image_read_elf(struct sim_view file, uint32_t capability, struct sim_image *out)
{
	struct elf elf = { .file = file };
	if (!open_file(&elf))
		return CUDA_ERROR_INVALID_IMAGE;
	if (!runs_on(&elf, capability))
		return CUDA_ERROR_NO_BINARY_FOR_GPU;
	out->capability = elf.capability;
	elf.kernel_of_symbol = calloc(elf.n_symbols + 1, sizeof *elf.kernel_of_symbol);
	elf.kernel_of_section = calloc(elf.n_sections + 1, sizeof *elf.kernel_of_section);
	bool enough = elf.kernel_of_symbol && elf.kernel_of_section && add_kernels(&elf, out) && read_sections(&elf, out) &&
		      add_variables(&elf, out);
	free(elf.kernel_of_symbol);
	free(elf.kernel_of_section);
	return enough ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
