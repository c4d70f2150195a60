/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image_write.c - a description as a cubin, which image_elf.c reads back: what the linker of the simulated driver puts out.
 *
 * Code is zeros. Sections: the tables of names and symbols, .nv.info, .nv.global.init, .nv.global, and for each kernel its code,
 * attributes and shared memory.
 */
#include <elf.h>
#include <stdlib.h>

#include "simulated_driver/image.h"

#ifndef EM_CUDA
#define EM_CUDA 190
#endif
#define OSABI_CUDA 0x33
#define ABI_VERSION 7
#define SHT_CUDA_INFO 0x70000000u
#define VARIABLE_ALIGNMENT 256u
#define MANAGED_SYMBOL 0x04u
#define ENTRY_SYMBOL 0x10u

enum fixed_section { SECTION_NULL, SECTION_NAMES, SECTION_STRINGS, SECTION_SYMBOLS, SECTION_INFO, SECTION_VALUES, SECTION_ZEROS, N_FIXED };
enum kernel_section { KERNEL_CODE, KERNEL_INFO, KERNEL_SHARED, N_PER_KERNEL };
#define MOST_KERNELS ((SHN_LORESERVE - N_FIXED) / N_PER_KERNEL)

struct buffer {
	uint8_t *bytes;
	uint64_t length, room;
	bool failed;
};

struct writer {
	const struct sim_image *image;
	struct buffer names, strings, symbols, info, values, content; /* content: of all kernels' sections */
	uint64_t zeros_bytes;
	Elf64_Shdr *sections;
	unsigned n_sections;
};

/* Zeros where `bytes` is NULL. */
static uint64_t append(struct buffer *buffer, const void *bytes, uint64_t length)
{
	uint64_t at = buffer->length;
	if (buffer->failed || length > SIM_IMAGE_MAX_BYTES - at) {
		buffer->failed = true;
		return 0;
	}
	if (at + length > buffer->room) {
		uint64_t room = (at + length) * 2;
		uint8_t *grown = realloc(buffer->bytes, room);
		buffer->failed = !grown;
		if (!grown)
			return 0;
		buffer->bytes = grown;
		buffer->room = room;
	}
	if (bytes && length)
		memcpy(buffer->bytes + at, bytes, length);
	else if (length)
		memset(buffer->bytes + at, 0, length);
	buffer->length += length;
	return at;
}

static void align(struct buffer *buffer, uint64_t alignment)
{
	append(buffer, NULL, (alignment - buffer->length % alignment) % alignment);
}

static uint32_t add_string(struct buffer *table, const char *prefix, const char *name)
{
	uint64_t at = append(table, prefix, strlen(prefix));
	append(table, name, strlen(name) + 1);
	return (uint32_t)at;
}

static void attribute(struct buffer *list, uint8_t which, const void *data, uint16_t bytes)
{
	uint8_t head[4] = { 4, which, (uint8_t)bytes, (uint8_t)(bytes >> 8) };
	append(list, head, sizeof head);
	append(list, data, bytes);
}

/* ---- kernels ----------------------------------------------------------------------------------------------------------- */

static void write_parameters(struct buffer *list, const struct sim_image_kernel *kernel)
{
	for (uint32_t i = 0; i < kernel->n_parameters; i++) {
		const struct sim_image_parameter *parameter = &kernel->parameters[i];
		uint32_t words[3] = { 0, (parameter->ordinal & 0xffff) | parameter->offset << 16, parameter->bytes };
		attribute(list, 0x45, words, sizeof words);
	}
}

static void write_kernel_info(struct buffer *list, const struct sim_image_kernel *kernel)
{
	uint32_t threads[3] = { kernel->max_threads, 1, 1 };
	if (kernel->max_threads)
		attribute(list, 0x05, threads, sizeof threads);
	if (kernel->cluster[0])
		attribute(list, 0x3d, kernel->cluster, sizeof kernel->cluster);
	if (kernel->needs_cluster)
		append(list, (uint8_t[4]){ 1, 0x3e, 0, 0 }, 4);
	write_parameters(list, kernel);
}

static void section(struct writer *w, unsigned index, uint32_t name, uint32_t type, uint64_t flags, uint64_t offset, uint64_t size)
{
	w->sections[index] = (Elf64_Shdr){
		.sh_name = name, .sh_type = type, .sh_flags = flags, .sh_offset = offset, .sh_size = size, .sh_addralign = 1
	};
}

static void write_kernel(struct writer *w, uint32_t i)
{
	const struct sim_image_kernel *kernel = &w->image->kernels[i];
	unsigned first = N_FIXED + i * N_PER_KERNEL;
	uint64_t share = w->image->code_bytes / w->image->n_kernels, rest = w->image->code_bytes % w->image->n_kernels;
	uint64_t code_bytes = share + (i == 0 ? rest : 0);
	/* compute capability 9.0 and newer: a block's reserved 1 KiB is counted */
	uint64_t shared_bytes = kernel->shared_bytes + (w->image->capability >= 90 && kernel->shared_bytes ? UINT64_C(1024) : 0);
	Elf64_Sym symbol = { .st_name = add_string(&w->strings, "", kernel->name),
			     .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC),
			     .st_other = ENTRY_SYMBOL,
			     .st_shndx = (Elf64_Half)first,
			     .st_size = code_bytes };
	uint32_t number = (uint32_t)(append(&w->symbols, &symbol, sizeof symbol) / sizeof symbol);
	attribute(&w->info, 0x2f, (uint32_t[2]){ number, kernel->registers }, 8);
	attribute(&w->info, 0x11, (uint32_t[2]){ number, kernel->local_bytes }, 8);
	section(w, first + KERNEL_CODE, add_string(&w->names, ".text.", kernel->name), SHT_PROGBITS, SHF_ALLOC | SHF_EXECINSTR,
		append(&w->content, NULL, code_bytes), code_bytes);
	uint64_t info = w->content.length;
	write_kernel_info(&w->content, kernel);
	section(w, first + KERNEL_INFO, add_string(&w->names, ".nv.info.", kernel->name), SHT_CUDA_INFO, 0, info, w->content.length - info);
	section(w, first + KERNEL_SHARED, add_string(&w->names, ".nv.shared.", kernel->name), SHT_NOBITS, SHF_ALLOC | SHF_WRITE, 0,
		shared_bytes);
	w->sections[first + KERNEL_INFO].sh_info = w->sections[first + KERNEL_SHARED].sh_info = first;
}

/* A function of the driver that the code calls. */
static void write_call(struct writer *w, const char *name)
{
	Elf64_Sym symbol = { .st_name = add_string(&w->strings, "", name), .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC) };
	append(&w->symbols, &symbol, sizeof symbol);
}

/* ---- variables --------------------------------------------------------------------------------------------------------- */

static void write_variable(struct writer *w, const struct sim_image_variable *variable)
{
	const struct sim_image_block *block = &w->image->blocks[variable->block];
	bool has_value = variable->offset < block->initial_bytes;
	Elf64_Sym symbol = { .st_name = add_string(&w->strings, "", variable->name),
			     .st_info = ELF64_ST_INFO(STB_GLOBAL, STT_OBJECT),
			     .st_other = block->is_managed ? MANAGED_SYMBOL : 0,
			     .st_shndx = has_value ? SECTION_VALUES : SECTION_ZEROS,
			     .st_size = variable->bytes };
	if (has_value) {
		uint64_t known = block->initial_bytes - variable->offset;
		known = known < variable->bytes ? known : variable->bytes;
		align(&w->values, VARIABLE_ALIGNMENT);
		symbol.st_value = append(&w->values, block->initial + variable->offset, known);
		append(&w->values, NULL, variable->bytes - known);
	} else {
		symbol.st_value = (w->zeros_bytes + VARIABLE_ALIGNMENT - 1) / VARIABLE_ALIGNMENT * VARIABLE_ALIGNMENT;
		w->zeros_bytes = symbol.st_value + variable->bytes;
	}
	append(&w->symbols, &symbol, sizeof symbol);
}

/* ---- the file ---------------------------------------------------------------------------------------------------------- */

/* A fixed section with this content goes into the file. */
static void put(struct writer *w, struct buffer *file, unsigned index, uint32_t name, uint32_t type, uint64_t flags,
		const struct buffer *content)
{
	align(file, 8);
	section(w, index, name, type, flags, append(file, content->bytes, content->length), content->length);
	file->failed |= content->failed;
}

static void put_kernels(struct writer *w, struct buffer *file)
{
	align(file, 8);
	uint64_t base = append(file, w->content.bytes, w->content.length);
	for (unsigned i = N_FIXED; i < w->n_sections; i++)
		w->sections[i].sh_offset += base;
	file->failed |= w->content.failed;
}

static void put_all(struct writer *w, struct buffer *file)
{
	Elf64_Ehdr header = { .e_ident = { ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64, ELFDATA2LSB, EV_CURRENT, OSABI_CUDA,
					   ABI_VERSION },
			      .e_type = ET_EXEC,
			      .e_machine = EM_CUDA,
			      .e_version = EV_CURRENT,
			      .e_flags = w->image->capability | 0x500u | w->image->capability << 16,
			      .e_ehsize = sizeof header,
			      .e_shentsize = sizeof(Elf64_Shdr),
			      .e_shnum = (Elf64_Half)w->n_sections,
			      .e_shstrndx = SECTION_NAMES };
	uint32_t strings = add_string(&w->names, "", ".strtab"), symbols = add_string(&w->names, "", ".symtab");
	uint32_t info = add_string(&w->names, "", ".nv.info"), values = add_string(&w->names, "", ".nv.global.init");
	uint32_t zeros = add_string(&w->names, "", ".nv.global"), names = add_string(&w->names, "", ".shstrtab");
	append(file, &header, sizeof header);
	put(w, file, SECTION_NAMES, names, SHT_STRTAB, 0, &w->names);
	put(w, file, SECTION_STRINGS, strings, SHT_STRTAB, 0, &w->strings);
	put(w, file, SECTION_SYMBOLS, symbols, SHT_SYMTAB, 0, &w->symbols);
	put(w, file, SECTION_INFO, info, SHT_CUDA_INFO, 0, &w->info);
	put(w, file, SECTION_VALUES, values, SHT_PROGBITS, SHF_ALLOC | SHF_WRITE, &w->values);
	section(w, SECTION_ZEROS, zeros, SHT_NOBITS, SHF_ALLOC | SHF_WRITE, 0, w->zeros_bytes);
	put_kernels(w, file);
	w->sections[SECTION_SYMBOLS].sh_link = SECTION_STRINGS;
	w->sections[SECTION_SYMBOLS].sh_entsize = sizeof(Elf64_Sym);
	align(file, 8);
	uint64_t table = append(file, w->sections, w->n_sections * sizeof *w->sections);
	if (!file->failed)
		((Elf64_Ehdr *)(void *)file->bytes)->e_shoff = table;
}

CUresult sim_image_write(const struct sim_image *image, uint8_t **bytes, uint64_t *length)
{
	struct writer w = { .image = image, .n_sections = N_FIXED + image->n_kernels * N_PER_KERNEL };
	struct buffer file = { .bytes = NULL };
	Elf64_Sym none = { .st_name = 0 };
	if (image->n_kernels > MOST_KERNELS)
		return CUDA_ERROR_INVALID_IMAGE;
	w.sections = calloc(w.n_sections, sizeof *w.sections);
	file.failed = !w.sections;
	append(&w.names, "", 1);
	append(&w.strings, "", 1);
	append(&w.symbols, &none, sizeof none);
	for (uint32_t i = 0; w.sections && i < image->n_kernels; i++)
		write_kernel(&w, i);
	for (uint32_t i = 0; i < image->n_variables; i++)
		write_variable(&w, &image->variables[i]);
	if (image->calls_malloc)
		write_call(&w, "malloc");
	if (image->calls_printf)
		write_call(&w, "vprintf");
	if (w.sections)
		put_all(&w, &file);
	struct buffer *parts[] = { &w.names, &w.strings, &w.symbols, &w.info, &w.values, &w.content };
	for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++)
		free(parts[i]->bytes);
	free(w.sections);
	*bytes = file.bytes;
	*length = file.length;
	if (!file.failed)
		return CUDA_SUCCESS;
	free(file.bytes);
	return CUDA_ERROR_OUT_OF_MEMORY;
}
