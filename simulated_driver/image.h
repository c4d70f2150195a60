/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.h - what a module image holds: kernels with their parameters, variables with their first bytes, and the size of its code.
 *
 * The readers know no device, context or handle: bytes in, a description out. They trust nothing in the bytes. Every read goes through a
 * struct sim_view and is checked against its length.
 *
 *   image.c         which form an image has, and how long one in the program's memory is
 *   image_text.c    PTX, and the simulated driver's own annotations
 *   image_elf.c     cubins
 *   image_fatbin.c  containers of both, and the choice of the entry that fits a device
 *   image_unpack.c  LZ4 and zstd
 *   image_write.c   a description as a cubin
 */
#ifndef ALIQUOT_SIM_IMAGE_H
#define ALIQUOT_SIM_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda_abi.h"

#define SIM_IMAGE_MAX_BYTES (UINT64_C(1) << 30)
#define SIM_FATBIN_MAGIC 0xba55ed50u
#define SIM_WRAPPER_MAGIC 0x466243b1u

struct sim_view {
	const uint8_t *bytes;
	uint64_t length;
};

/* The part of a view, or an empty one where it does not hold all of the part. */
static inline bool sim_view_part(struct sim_view view, uint64_t offset, uint64_t length, struct sim_view *part)
{
	bool inside = offset <= view.length && length <= view.length - offset;
	*part = inside ? (struct sim_view){ view.bytes + offset, length } : (struct sim_view){ NULL, 0 };
	return inside;
}

static inline bool sim_view_read(struct sim_view view, uint64_t offset, void *out, uint64_t length)
{
	struct sim_view part;
	if (!sim_view_part(view, offset, length, &part))
		return false;
	if (length)
		memcpy(out, part.bytes, length);
	return true;
}

struct sim_image_parameter {
	uint32_t ordinal, offset, bytes;
};

struct sim_image_kernel {
	char *name;
	uint64_t duration_ns; /* per launch on the whole GPU; 0: by grid size */
	uint32_t registers, shared_bytes, local_bytes, max_threads;
	uint32_t cluster[3]; /* blocks of a cluster, as compiled; 0: not fixed */
	bool needs_cluster; /* a launch must give its size */
	uint32_t n_parameters, parameter_room;
	struct sim_image_parameter *parameters; /* in their order */
};

/* Variables that lie together in memory: `initial` bytes first, zeros behind them. */
struct sim_image_block {
	uint64_t bytes, initial_bytes;
	uint8_t *initial;
	bool is_managed;
};

struct sim_image_variable {
	char *name;
	uint32_t block;
	uint64_t offset, bytes;
};

struct sim_image {
	bool is_open; /* its content is not known: any name is a kernel */
	bool calls_malloc, calls_printf; /* device functions of the driver, which need memory of the context */
	uint32_t capability; /* major * 10 + minor that a cubin was compiled for; 0: text */
	uint64_t code_bytes;
	uint32_t n_kernels, kernel_room, n_variables, variable_room, n_blocks, block_room;
	struct sim_image_kernel *kernels;
	struct sim_image_variable *variables;
	struct sim_image_block *blocks;
};

/* What the image holds for a device of this compute capability (major * 10 + minor). `out` needs sim_image_free in any case. */
CUresult sim_image_read(struct sim_view image, uint32_t capability, struct sim_image *out);
void sim_image_free(struct sim_image *image);

/* An image in the program's memory ends where its own headers, or the end of its text, say. A wrapper leads to the fat binary inside. */
CUresult sim_image_locate(const void *image, struct sim_view *out);

/* A cubin with the same content for the image's compute capability; code is zeros. *bytes is malloc's. */
CUresult sim_image_write(const struct sim_image *image, uint8_t **bytes, uint64_t *length);

/* One reader per form. */
CUresult sim_image_read_text(const char *text, struct sim_image *out);
CUresult sim_image_read_elf(struct sim_view file, uint32_t capability, struct sim_image *out);
CUresult sim_image_read_fatbin(struct sim_view fatbin, uint32_t capability, struct sim_image *out);

/* Builders. The pointers stay valid until the next call; NULL without memory. They take over `name`, also on failure. */
struct sim_image_kernel *sim_image_add_kernel(struct sim_image *image, char *name);
struct sim_image_variable *sim_image_add_variable(struct sim_image *image, char *name, uint64_t bytes);
uint32_t sim_image_add_block(struct sim_image *image, bool is_managed); /* UINT32_MAX without memory */
bool sim_image_add_parameter(struct sim_image_kernel *kernel, struct sim_image_parameter parameter);
struct sim_image_kernel *sim_image_kernel(const struct sim_image *image, const char *name);
/* The image's code calls this function, which is not in the image. */
void sim_image_note_call(struct sim_image *image, const char *name);

/* False: not in this format, cut short, or longer than `room`. The number of bytes comes back in *length. */
bool sim_unpack_lz4(struct sim_view packed, uint8_t *out, uint64_t room, uint64_t *length);
bool sim_unpack_zstd(struct sim_view packed, uint8_t *out, uint64_t room, uint64_t *length);
bool sim_unpack_has_zstd(void); /* loads libzstd at the first call, and says once where it is missing */

#endif
