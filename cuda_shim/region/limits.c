/* SPDX-License-Identifier: Apache-2.0 */
#include "region/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "limit/priority.h"

#define FIRST_COPY_TRIES 2000 /* with a yield each: about as many milliseconds at worst, then the writer is treated as dead */
#define REFRESH_TRIES 3

/* CRC-32 (IEEE 802.3), a nibble at a time: 64 bytes of table, and the page changes rarely. */
static uint32_t crc32_of(const unsigned char *data, size_t bytes)
{
	static const uint32_t table[16] = {
		0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
		0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
	};
	uint32_t crc = ~0u;

	for (size_t i = 0; i < bytes; i++) {
		crc = (crc >> 4) ^ table[(crc ^ data[i]) & 15];
		crc = (crc >> 4) ^ table[(crc ^ (data[i] >> 4)) & 15];
	}
	return ~crc;
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

bool aq_uuid_parse(const char *text, unsigned char uuid[16])
{
	const char *cursor = strchr(text, '-');
	unsigned digits = 0;

	for (cursor = cursor ? cursor + 1 : text; *cursor; cursor++) {
		int digit = hex_digit(*cursor);

		if (*cursor == '-')
			continue;
		if (digit < 0 || digits == 32)
			return false;
		uuid[digits / 2] = (unsigned char)(digits % 2 ? uuid[digits / 2] | digit : digit << 4);
		digits++;
	}
	return digits == 32;
}

/* The page is shared with a writer, so it is copied in words that cannot tear; acquire keeps the second look at the generation behind
 * them. */
static void copy_page(const struct aq_limits *limits, unsigned char *copy)
{
	const _Atomic uint64_t *from = (const _Atomic uint64_t *)(const void *)limits->page;

	for (size_t i = 0; i < limits->bytes / 8; i++) {
		uint64_t word = atomic_load_explicit(&from[i], memory_order_acquire);
		memcpy(copy + 8 * i, &word, 8);
	}
}

/* NULL when the copy is a complete page that is not being written; else what is wrong with it. */
static const char *check_copy(const unsigned char *copy, size_t bytes)
{
	struct aq_limits_header header;

	memcpy(&header, copy, sizeof(header));
	if (header.magic != AQ_LIMITS_MAGIC || header.abi_major != AQ_ABI_MAJOR)
		return "it has another ABI version";
	uint64_t end = header.header_bytes + (uint64_t)header.device_count * header.device_stride;
	if (header.header_bytes < sizeof(header) || header.device_stride < sizeof(struct aq_limits_device) ||
	    header.device_count > AQ_MAX_DEVICES || end > bytes)
		return "its header and devices do not fit its size";
	if (crc32_of(copy + offsetof(struct aq_limits_header, device_stride), end - offsetof(struct aq_limits_header, device_stride)) !=
	    header.checksum)
		return "its checksum does not match its content";
	return NULL;
}

static const char *adopt_device(struct aq_device_limit *device, const struct aq_limits_device *written, bool known)
{
	if (!known) {
		memcpy(device->uuid_text, written->uuid, sizeof(device->uuid_text) - 1);
		if (!aq_uuid_parse(device->uuid_text, device->uuid))
			return "it names a device by text that is not a UUID";
	}
	uint64_t overhead = written->overhead_bytes < written->memory_bytes ? written->overhead_bytes : written->memory_bytes;
	bool unlimited = written->memory_bytes == AQ_MEMORY_UNLIMITED;
	atomic_store_explicit(&device->memory_bytes, unlimited ? AQ_MEMORY_UNLIMITED : written->memory_bytes - overhead,
			      memory_order_relaxed);
	bool oversubscribed = !unlimited && written->burst_bytes > written->memory_bytes;
	atomic_store_explicit(&device->burst_bytes, oversubscribed ? written->burst_bytes - overhead : 0, memory_order_relaxed);
	atomic_store_explicit(&device->overhead_bytes, unlimited ? 0 : overhead, memory_order_relaxed);
	atomic_store_explicit(&device->context_bytes, written->context_bytes, memory_order_relaxed);
	atomic_store_explicit(&device->sm_percent, written->sm_percent, memory_order_relaxed);
	atomic_store_explicit(&device->pause, written->pause, memory_order_relaxed);
	atomic_store_explicit(&device->priority, written->priority, memory_order_relaxed);
	atomic_store_explicit(&device->priority_line, written->priority_line <= AQ_PRIORITY_LINES ? written->priority_line : 0,
			      memory_order_relaxed);
	return NULL;
}

static const char *adopt(struct aq_limits *limits, const unsigned char *copy)
{
	struct aq_limits_header header;
	uint32_t known = atomic_load_explicit(&limits->device_count, memory_order_relaxed);

	memcpy(&header, copy, sizeof(header));
	if (header.device_count < known)
		return "it lists fewer devices than before";
	for (uint32_t i = 0; i < header.device_count; i++) {
		struct aq_limits_device written;

		memcpy(&written, copy + header.header_bytes + (size_t)i * header.device_stride, sizeof(written));
		const char *wrong = adopt_device(&limits->device[i], &written, i < known);
		if (wrong)
			return wrong;
	}
	limits->policy_flags = header.policy_flags;
	aq_log_set_level(header.log_level);
	atomic_store_explicit(&limits->device_count, header.device_count, memory_order_release);
	return NULL;
}

/* One reading of the page: NULL when it was adopted. `*generation` is what was read. */
static const char *read_once(struct aq_limits *limits, unsigned char *copy, uint64_t *generation)
{
	/* Pairs with the writer's stores before its even generation. */
	*generation = atomic_load_explicit(&limits->page->generation, memory_order_acquire);
	if (*generation & 1)
		return "it is being written, or its writer was killed while writing";
	copy_page(limits, copy);
	if (atomic_load_explicit(&limits->page->generation, memory_order_relaxed) != *generation)
		return "it is being written";
	const char *wrong = check_copy(copy, limits->bytes);
	return wrong ? wrong : adopt(limits, copy);
}

static const char *read_page(struct aq_limits *limits, unsigned tries)
{
	unsigned char *copy = calloc(1, limits->bytes);
	const char *wrong = "no memory to copy it";
	uint64_t generation = 0;

	if (!copy)
		return wrong;
	for (unsigned i = 0; i < tries; i++) {
		wrong = read_once(limits, copy, &generation);
		if (!wrong)
			break;
		sched_yield();
	}
	free(copy);
	/* A damaged page is recorded too, or every call would read it again; a new generation is read again. */
	if (!(generation & 1))
		atomic_store_explicit(&limits->generation, generation, memory_order_relaxed);
	return wrong;
}

bool aq_limits_refresh(struct aq_limits *limits)
{
	bool taken = false;

	if (atomic_load_explicit(&limits->page->generation, memory_order_relaxed) & 1)
		return false;
	if (atomic_exchange_explicit(&limits->refreshing, true, memory_order_acquire))
		return false; /* another thread is at it; the old copy serves until it is done */
	if (aq_limits_changed(limits)) {
		const char *wrong = read_page(limits, REFRESH_TRIES);

		if (wrong)
			aq_log_warn("the limits file changed, but the old limits stay in force: %s", wrong);
		taken = !wrong;
	}
	atomic_store_explicit(&limits->refreshing, false, memory_order_release);
	return taken;
}

static int map_page(struct aq_limits *limits, const char *path, struct aq_fault *fault)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return aq_fault(fault, "cannot open the limits file %s: %s", path, strerror(errno));
	off_t bytes = lseek(fd, 0, SEEK_END); /* fstat needs glibc 2.33 */
	if (bytes < (off_t)sizeof(struct aq_limits_header) || bytes > (off_t)AQ_LIMITS_BYTES_MAX) {
		close(fd);
		return aq_fault(fault, "the limits file %s is %s: %lld bytes, expected %zu", path,
				bytes > (off_t)AQ_LIMITS_BYTES_MAX ? "damaged" : "truncated", (long long)bytes, AQ_LIMITS_BYTES);
	}
	limits->bytes = (size_t)bytes & ~(size_t)7;
	void *page = mmap(NULL, limits->bytes, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (page == MAP_FAILED)
		return aq_fault(fault, "cannot map the limits file %s: %s", path, strerror(errno));
	limits->page = page;
	return 0;
}

int aq_limits_map(struct aq_limits *limits, const char *path, struct aq_fault *fault)
{
	memset(limits, 0, sizeof(*limits));
	if (map_page(limits, path, fault))
		return -1;
	const struct aq_limits_header *page = limits->page;
	if (page->magic != AQ_LIMITS_MAGIC)
		return aq_fault(fault, "%s is not a limits file: magic %#llx, expected %#llx", path, (unsigned long long)page->magic,
				AQ_LIMITS_MAGIC);
	limits->policy_flags = page->policy_flags;
	if (page->abi_major != AQ_ABI_MAJOR)
		return aq_fault(fault, "the limits file %s has ABI version %u, expected %u", path, page->abi_major, AQ_ABI_MAJOR);
	const char *wrong = read_page(limits, FIRST_COPY_TRIES);
	return wrong ? aq_fault(fault, "the limits file %s is damaged: %s", path, wrong) : 0;
}

void aq_limits_unmap(struct aq_limits *limits)
{
	if (limits->page)
		munmap((void *)(uintptr_t)limits->page, limits->bytes);
	memset(limits, 0, sizeof(*limits));
}

int aq_limits_find(const struct aq_limits *limits, const unsigned char uuid[16])
{
	uint32_t count = atomic_load_explicit(&limits->device_count, memory_order_acquire);

	for (uint32_t i = 0; i < count; i++)
		if (!memcmp(limits->device[i].uuid, uuid, 16))
			return (int)i;
	return -1;
}
