/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image_unpack.c - the two compressions of fat binaries.
 *
 * LZ4 block format: a sequence is a token (length of literals, length of match - 4), the literals, and two bytes of distance back. Lengths
 * of 15 go on in bytes until one is not 255. The last sequence has literals only.
 * (https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md)
 *
 * zstd is the system's library, loaded when an image first needs it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "simulated_driver/image.h"

#define LONG_LENGTH 15u
#define LEAST_MATCH 4u

static bool next_byte(struct sim_view packed, uint64_t *at, uint8_t *byte)
{
	return sim_view_read(packed, (*at)++, byte, 1);
}

/* The rest of a length that began with 15. */
static bool long_length(struct sim_view packed, uint64_t *at, uint64_t *length)
{
	uint8_t byte = 255;
	if (*length != LONG_LENGTH)
		return true;
	while (byte == 255) {
		if (!next_byte(packed, at, &byte))
			return false;
		*length += byte;
	}
	return true;
}

/* The distance may be shorter than the match, which then repeats itself. */
static bool copy_match(struct sim_view packed, uint64_t *at, uint64_t length, uint8_t *out, uint64_t room, uint64_t *done)
{
	uint8_t distance_bytes[2];
	if (!sim_view_read(packed, *at, distance_bytes, sizeof distance_bytes))
		return false;
	*at += sizeof distance_bytes;
	uint64_t distance = distance_bytes[0] | (uint64_t)distance_bytes[1] << 8;
	if (!long_length(packed, at, &length))
		return false;
	length += LEAST_MATCH;
	if (distance == 0 || distance > *done || length > room - *done)
		return false;
	for (uint64_t i = 0; i < length; i++, (*done)++)
		out[*done] = out[*done - distance];
	return true;
}

bool sim_unpack_lz4(struct sim_view packed, uint8_t *out, uint64_t room, uint64_t *length)
{
	uint64_t at = 0, done = 0;
	while (at < packed.length) {
		uint8_t token = 0;
		next_byte(packed, &at, &token);
		uint64_t literals = token >> 4;
		if (!long_length(packed, &at, &literals) || literals > room - done || !sim_view_read(packed, at, out + done, literals))
			return false;
		at += literals;
		done += literals;
		if (at < packed.length && !copy_match(packed, &at, token & LONG_LENGTH, out, room, &done))
			return false;
	}
	*length = done;
	return true;
}

/* ---- zstd -------------------------------------------------------------------------------------------------------------- */

static struct {
	size_t (*decompress)(void *out, size_t room, const void *packed, size_t length);
	unsigned (*is_error)(size_t result);
} zstd;

static void load_zstd(void)
{
	void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
	if (library) {
		*(void **)&zstd.is_error = dlsym(library, "ZSTD_isError");
		*(void **)&zstd.decompress = dlsym(library, "ZSTD_decompress");
	}
	if (!zstd.decompress || !zstd.is_error)
		fprintf(stderr,
			"aliquot simulated driver: libzstd.so.1 is missing, so images that are compressed with zstd are not read: every "
			"name is a kernel of them. Install libzstd1.\n");
}

bool sim_unpack_has_zstd(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, load_zstd);
	return zstd.decompress && zstd.is_error;
}

bool sim_unpack_zstd(struct sim_view packed, uint8_t *out, uint64_t room, uint64_t *length)
{
	size_t result = zstd.decompress(out, room, packed.bytes, packed.length);
	*length = result;
	return !zstd.is_error(result);
}
