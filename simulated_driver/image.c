/* SPDX-License-Identifier: Apache-2.0 */
/* image.c - which form an image has, where it ends, and the arrays that describe it. */
#define _GNU_SOURCE
#include "simulated_driver/image.h"

#include <elf.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE_BYTES 4096u
#define PROBES 512u

static uint32_t magic_of(struct sim_view image)
{
	uint32_t magic = 0;
	sim_view_read(image, 0, &magic, sizeof magic);
	return magic;
}

static bool is_elf(uint32_t magic)
{
	return memcmp(&magic, ELFMAG, SELFMAG) == 0;
}

static CUresult read_text(struct sim_view image, struct sim_image *out)
{
	char *text = malloc(image.length + 1);
	if (!text)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(text, image.bytes, image.length);
	text[image.length] = '\0';
	CUresult result = sim_image_read_text(text, out);
	free(text);
	return result;
}

CUresult sim_image_read(struct sim_view image, uint32_t capability, struct sim_image *out)
{
	*out = (struct sim_image){ .is_open = false };
	uint32_t magic = magic_of(image);
	if (image.length == 0 || image.bytes[0] == '\0' || magic == SIM_WRAPPER_MAGIC)
		return CUDA_ERROR_INVALID_IMAGE;
	if (is_elf(magic))
		return sim_image_read_elf(image, capability, out);
	return magic == SIM_FATBIN_MAGIC ? sim_image_read_fatbin(image, capability, out) : read_text(image, out);
}

void sim_image_free(struct sim_image *image)
{
	for (uint32_t i = 0; i < image->n_kernels; i++) {
		free(image->kernels[i].name);
		free(image->kernels[i].parameters);
	}
	for (uint32_t i = 0; i < image->n_variables; i++)
		free(image->variables[i].name);
	for (uint32_t i = 0; i < image->n_blocks; i++)
		free(image->blocks[i].initial);
	free(image->kernels);
	free(image->variables);
	free(image->blocks);
	*image = (struct sim_image){ .is_open = false };
}

/* ---- building ---------------------------------------------------------------------------------------------------------- */

/* A zeroed place behind the last of an array; NULL without memory. */
static void *append(void **array, uint32_t *count, uint32_t *room, size_t size)
{
	if (*count == *room) {
		uint32_t wanted = *room ? *room * 2 : 8;
		void *grown = wanted > *room ? realloc(*array, wanted * size) : NULL;
		if (!grown)
			return NULL;
		*array = grown;
		*room = wanted;
	}
	return memset((char *)*array + size * (*count)++, 0, size);
}

struct sim_image_kernel *sim_image_add_kernel(struct sim_image *image, char *name)
{
	struct sim_image_kernel *kernel = name ? append((void **)&image->kernels, &image->n_kernels, &image->kernel_room, sizeof *kernel)
					       : NULL;
	if (kernel)
		kernel->name = name;
	else
		free(name);
	return kernel;
}

struct sim_image_variable *sim_image_add_variable(struct sim_image *image, char *name, uint64_t bytes)
{
	struct sim_image_variable *variable = name ? append((void **)&image->variables, &image->n_variables, &image->variable_room,
							    sizeof *variable)
						   : NULL;
	if (variable)
		*variable = (struct sim_image_variable){ .name = name, .bytes = bytes };
	else
		free(name);
	return variable;
}

uint32_t sim_image_add_block(struct sim_image *image, bool is_managed)
{
	struct sim_image_block *block = append((void **)&image->blocks, &image->n_blocks, &image->block_room, sizeof *block);
	if (!block)
		return UINT32_MAX;
	block->is_managed = is_managed;
	return image->n_blocks - 1;
}

bool sim_image_add_parameter(struct sim_image_kernel *kernel, struct sim_image_parameter parameter)
{
	struct sim_image_parameter *last = append((void **)&kernel->parameters, &kernel->n_parameters, &kernel->parameter_room,
						  sizeof parameter);
	if (last)
		*last = parameter;
	return last != NULL;
}

struct sim_image_kernel *sim_image_kernel(const struct sim_image *image, const char *name)
{
	for (uint32_t i = 0; i < image->n_kernels; i++)
		if (strcmp(image->kernels[i].name, name) == 0)
			return &image->kernels[i];
	return NULL;
}

void sim_image_note_call(struct sim_image *image, const char *name)
{
	image->calls_malloc |= strcmp(name, "malloc") == 0 || strcmp(name, "free") == 0;
	image->calls_printf |= strcmp(name, "vprintf") == 0;
}

/* ---- images in the program's memory ------------------------------------------------------------------------------------- */

/* Reads one byte of each page through the kernel, which answers with an error where a load would end the program. Where it does not
 * offer that, the program is trusted. */
static bool is_readable(const uint8_t *at, uint64_t length)
{
	uint8_t bytes[PROBES];
	struct iovec from[PROBES], to = { bytes, 0 };
	for (uint64_t offset = 0; offset < length; offset += to.iov_len * PAGE_BYTES) {
		uint64_t pages = (length - offset + PAGE_BYTES - 1) / PAGE_BYTES;
		to.iov_len = pages < PROBES ? pages : PROBES;
		for (size_t i = 0; i < to.iov_len; i++)
			from[i] = (struct iovec){ (void *)(uintptr_t)(at + offset + i * PAGE_BYTES), 1 };
		ssize_t got = process_vm_readv(getpid(), &to, 1, from, to.iov_len, 0);
		if (got < 0 && errno != EFAULT)
			return true;
		if (got != (ssize_t)to.iov_len)
			return false;
	}
	uint8_t *last = bytes;
	struct iovec end = { (void *)(uintptr_t)(at + length - 1), 1 };
	return length == 0 || process_vm_readv(getpid(), &(struct iovec){ last, 1 }, 1, &end, 1, 0) == 1 || errno != EFAULT;
}

static uint64_t table_end(uint64_t offset, uint64_t entry_bytes, uint64_t count)
{
	return offset < SIM_IMAGE_MAX_BYTES ? offset + entry_bytes * count : SIM_IMAGE_MAX_BYTES + 1;
}

/* The last of a cubin's tables and sections. False: no ELF file of 64 bits. */
static bool elf_length(const uint8_t *image, uint64_t *length)
{
	Elf64_Ehdr header;
	Elf64_Shdr section;
	if (!is_readable(image, sizeof header) || image[EI_CLASS] != ELFCLASS64)
		return false;
	memcpy(&header, image, sizeof header);
	uint64_t sections = table_end(header.e_shoff, sizeof section, header.e_shnum);
	uint64_t end = table_end(header.e_phoff, header.e_phentsize, header.e_phnum);
	end = sections > end ? sections : end;
	if (sections > SIM_IMAGE_MAX_BYTES || !is_readable(image + header.e_shoff, sections - header.e_shoff))
		return false;
	for (unsigned i = 0; i < header.e_shnum; i++) {
		memcpy(&section, image + header.e_shoff + i * sizeof section, sizeof section);
		uint64_t section_end = section.sh_type == SHT_NOBITS ? 0 : table_end(section.sh_offset, section.sh_size, 1);
		end = section_end > end ? section_end : end;
	}
	*length = end;
	return true;
}

static bool fatbin_length(const uint8_t *image, uint64_t *length)
{
	uint16_t header_bytes;
	uint64_t bytes;
	if (!is_readable(image, 16))
		return false;
	memcpy(&header_bytes, image + 6, sizeof header_bytes);
	memcpy(&bytes, image + 8, sizeof bytes);
	*length = bytes < SIM_IMAGE_MAX_BYTES ? header_bytes + bytes : SIM_IMAGE_MAX_BYTES + 1;
	return true;
}

static bool binary_length(const uint8_t *image, uint32_t magic, uint64_t *length)
{
	return magic == SIM_FATBIN_MAGIC ? fatbin_length(image, length) : elf_length(image, length);
}

CUresult sim_image_locate(const void *image, struct sim_view *out)
{
	struct {
		uint32_t magic, version;
		const void *fatbin, *more;
	} wrapper;
	uint32_t magic = 0;
	*out = (struct sim_view){ image, strnlen(image, sizeof magic) };
	magic = magic_of(*out);
	if (magic == SIM_WRAPPER_MAGIC) {
		memcpy(&wrapper, image, sizeof wrapper);
		image = wrapper.fatbin;
		if (!image || !is_readable(image, sizeof magic))
			return CUDA_ERROR_INVALID_IMAGE;
		memcpy(&magic, image, sizeof magic);
	}
	*out = (struct sim_view){ image, 0 };
	if (magic != SIM_FATBIN_MAGIC && !is_elf(magic)) {
		out->length = strlen(image);
		return CUDA_SUCCESS;
	}
	if (!binary_length(image, magic, &out->length) || out->length > SIM_IMAGE_MAX_BYTES || !is_readable(image, out->length))
		return CUDA_ERROR_INVALID_IMAGE;
	return CUDA_SUCCESS;
}
