/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image_fatbin.c - fat binaries: one entry per architecture, and the one that a device takes.
 *
 * A device runs a cubin of its own major version with a minor version that is not above its own; the newest such entry is best. An entry
 * for sm_90a runs on 9.0 only. Without one, PTX of an architecture that is not above the device's is compiled. Entries of other kinds
 * (intermediate code for the linker) are passed over.
 *
 * Layout, as read in what fatbinary of CUDA 11 to 13 writes (sizes in bytes, little endian):
 *     header   magic 4, version 2, header size 2, size of all entries 8
 *     entry    kind 2, version 2, header size 4, payload size 8, compressed size 4, options 4, code version 4, architecture 4,
 *              name offset 4, name size 4, flags 8, reserved 8, size without compression 8
 *     several  an entry of kind 0x100 compresses many images together: behind its header a count 4, a size 4, and one 64-byte header per
 *              image, where the second field is the offset in what was compressed and the third its size
 */
#include <stdlib.h>

#include "simulated_driver/image.h"

#define HEADER_BYTES 16u
#define LEAST_ENTRY_BYTES 48u /* up to the flags */
#define FULL_ENTRY_BYTES 64u

#define FLAG_LZ4 0x2000u
#define FLAG_ZSTD 0x8000u
#define FLAG_ARCHITECTURE_ONLY 0x100000u /* sm_90a */
#define FLAG_FAMILY 0x200000u /* sm_100f */

enum kind { KIND_PTX = 1, KIND_ELF = 2, KIND_SEVERAL = 0x100 };

struct __attribute__((packed)) entry_header {
	uint16_t kind, version;
	uint32_t header_bytes; /* of one image among several: its offset */
	uint64_t payload_bytes;
	uint32_t compressed_bytes, options, code_version, architecture, name, name_bytes;
	uint64_t flags, reserved, unpacked_bytes;
};
_Static_assert(sizeof(struct entry_header) == FULL_ENTRY_BYTES, "an entry's header as fatbinary writes it");

/* The image that was chosen: where it is, how it is compressed, and which part of that is it. */
struct choice {
	uint32_t kind, rank; /* rank 0: no choice yet */
	struct sim_view payload;
	uint64_t flags, unpacked_bytes, offset, bytes;
};

static bool fits(const struct entry_header *entry, uint32_t capability)
{
	if (entry->flags & FLAG_ARCHITECTURE_ONLY)
		return entry->architecture == capability;
	if (entry->kind == KIND_ELF || entry->flags & FLAG_FAMILY)
		return entry->architecture / 10 == capability / 10 && entry->architecture <= capability;
	return entry->kind == KIND_PTX && entry->architecture <= capability;
}

/* A cubin before PTX, a newer one before an older one, the special form before the general one. */
static uint32_t rank_of(const struct entry_header *entry)
{
	uint32_t special = (entry->flags & (FLAG_ARCHITECTURE_ONLY | FLAG_FAMILY)) != 0;
	return (entry->kind == KIND_ELF ? 100000u : 1) + (entry->architecture & 0xfff) * 2 + special;
}

static void consider(struct choice *best, const struct entry_header *entry, uint32_t capability, const struct choice *here)
{
	if ((entry->kind != KIND_ELF && entry->kind != KIND_PTX) || !fits(entry, capability) || rank_of(entry) <= best->rank)
		return;
	*best = *here;
	best->kind = entry->kind;
	best->rank = rank_of(entry);
}

static bool consider_several(struct choice *best, struct sim_view header, uint32_t capability, const struct choice *here)
{
	uint32_t count;
	if (!sim_view_read(header, FULL_ENTRY_BYTES, &count, sizeof count))
		return false;
	for (uint64_t i = 0; i < count; i++) {
		struct entry_header image;
		if (!sim_view_read(header, FULL_ENTRY_BYTES + 8 + i * sizeof image, &image, sizeof image))
			return false;
		struct choice part = *here;
		part.offset = image.header_bytes;
		part.bytes = image.payload_bytes;
		consider(best, &image, capability, &part);
	}
	return true;
}

/* One entry at *at, which moves behind it. */
static bool read_entry(struct sim_view fatbin, uint64_t *at, uint32_t capability, struct choice *best)
{
	struct entry_header entry = { 0 };
	struct sim_view header;
	if (!sim_view_read(fatbin, *at, &entry, LEAST_ENTRY_BYTES) || entry.header_bytes < LEAST_ENTRY_BYTES ||
	    !sim_view_part(fatbin, *at, entry.header_bytes, &header))
		return false;
	sim_view_read(header, 0, &entry, header.length < sizeof entry ? header.length : sizeof entry);
	struct choice here = { .flags = entry.flags, .unpacked_bytes = entry.unpacked_bytes, .bytes = UINT64_MAX };
	if (!sim_view_part(fatbin, *at + entry.header_bytes, entry.payload_bytes, &here.payload))
		return false;
	if (entry.flags & (FLAG_LZ4 | FLAG_ZSTD) && !sim_view_part(here.payload, 0, entry.compressed_bytes, &here.payload))
		return false;
	*at += entry.header_bytes + entry.payload_bytes;
	if (entry.kind == KIND_SEVERAL)
		return consider_several(best, header, capability, &here);
	consider(best, &entry, capability, &here);
	return true;
}

/* ---- the chosen image --------------------------------------------------------------------------------------------------- */

static CUresult read_part(const struct choice *choice, struct sim_view whole, uint32_t capability, struct sim_image *out)
{
	struct sim_view image;
	uint64_t bytes = choice->bytes == UINT64_MAX ? whole.length - choice->offset : choice->bytes;
	if (!sim_view_part(whole, choice->offset, bytes, &image))
		return CUDA_ERROR_INVALID_IMAGE;
	if (choice->kind == KIND_PTX) /* zeros fill up its payload */
		while (image.length && image.bytes[image.length - 1] == '\0')
			image.length--;
	uint32_t magic = 0;
	sim_view_read(image, 0, &magic, sizeof magic);
	return magic == SIM_FATBIN_MAGIC ? CUDA_ERROR_INVALID_IMAGE : sim_image_read(image, capability, out);
}

static CUresult read_packed(const struct choice *choice, uint32_t capability, struct sim_image *out)
{
	struct sim_view whole = { NULL, 0 };
	bool is_zstd = choice->flags & FLAG_ZSTD;
	if (choice->unpacked_bytes > SIM_IMAGE_MAX_BYTES)
		return CUDA_ERROR_INVALID_IMAGE;
	if (is_zstd && !sim_unpack_has_zstd()) {
		*out = (struct sim_image){ .is_open = true, .code_bytes = choice->unpacked_bytes };
		return CUDA_SUCCESS;
	}
	uint8_t *bytes = malloc(choice->unpacked_bytes + 1);
	if (!bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = CUDA_ERROR_INVALID_IMAGE;
	if ((is_zstd ? sim_unpack_zstd : sim_unpack_lz4)(choice->payload, bytes, choice->unpacked_bytes, &whole.length)) {
		whole.bytes = bytes;
		result = read_part(choice, whole, capability, out);
	}
	free(bytes);
	return result;
}

CUresult sim_image_read_fatbin(struct sim_view fatbin, uint32_t capability, struct sim_image *out)
{
	struct choice best = { .rank = 0 };
	uint16_t header_bytes = 0;
	uint64_t entries_bytes = 0, at = 0;
	if (!sim_view_read(fatbin, 6, &header_bytes, sizeof header_bytes) ||
	    !sim_view_read(fatbin, 8, &entries_bytes, sizeof entries_bytes) || header_bytes < HEADER_BYTES ||
	    !sim_view_part(fatbin, header_bytes, entries_bytes, &fatbin))
		return CUDA_ERROR_INVALID_IMAGE;
	while (at < fatbin.length)
		if (!read_entry(fatbin, &at, capability, &best))
			return CUDA_ERROR_INVALID_IMAGE;
	if (!best.rank)
		return CUDA_ERROR_NO_BINARY_FOR_GPU;
	if (best.flags & (FLAG_LZ4 | FLAG_ZSTD))
		return read_packed(&best, capability, out);
	return read_part(&best, best.payload, capability, out);
}
