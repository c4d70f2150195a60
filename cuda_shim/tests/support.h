/* SPDX-License-Identifier: Apache-2.0 */
/* What the shim's C tests share: a check that prints its place, and a container's two files as the agent writes them. */
#ifndef AQ_TESTS_SUPPORT_H
#define AQ_TESTS_SUPPORT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "region/layout.h"

#define CHECK(condition)                                                                         \
	do {                                                                                     \
		if (!(condition)) {                                                              \
			fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
			exit(1);                                                                 \
		}                                                                                \
	} while (0)

#define MIB ((uint64_t)1 << 20)
#define FIRST_UUID "GPU-00112233-4455-6677-8899-aabbccddeeff"

/* A new directory under the temporary directory; removed by support_remove. */
const char *support_directory(void);
void support_remove(void);
/* Paths in it. */
const char *support_limits(void);
const char *support_region(void);

/* An empty region file. */
void support_write_region(void);

/* A complete limits page with this header. The UUID of device i is FIRST_UUID with its last byte + i. */
struct support_page {
	struct aq_limits_header header;
	struct aq_limits_device device[AQ_MAX_DEVICES];
};
void support_page(struct support_page *page, uint32_t devices, uint64_t memory_bytes);
/* The checksum that belongs to it. */
uint32_t support_checksum(const struct support_page *page);
/* Write it over the file at `path`, made when missing; the inode stays. */
void support_write_limits(const char *path, const struct support_page *page);

/* A small generator, so that a run can be repeated. */
uint32_t support_random(uint32_t *state);

#endif
