/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static char directory[256];
static char limits_path[sizeof(directory) + 16], region_path[sizeof(directory) + 16];

const char *support_directory(void)
{
	const char *temporary = getenv("TMPDIR");

	snprintf(directory, sizeof(directory), "%s/aliquot-test-XXXXXX", temporary ? temporary : P_tmpdir);
	CHECK(mkdtemp(directory));
	snprintf(limits_path, sizeof(limits_path), "%s/limits", directory);
	snprintf(region_path, sizeof(region_path), "%s/region", directory);
	return directory;
}

void support_remove(void)
{
	unlink(limits_path);
	unlink(region_path);
	CHECK(rmdir(directory) == 0);
}

const char *support_limits(void)
{
	return limits_path;
}

const char *support_region(void)
{
	return region_path;
}

static void write_file(const char *path, const void *data, size_t bytes, off_t size)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	CHECK(fd >= 0);
	CHECK(pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
	CHECK(ftruncate(fd, size) == 0);
	close(fd);
}

void support_write_region(void)
{
	struct aq_region_header header = {
		.magic = AQ_REGION_MAGIC,
		.abi_major = AQ_ABI_MAJOR,
		.abi_minor = AQ_ABI_MINOR,
		.header_bytes = sizeof(header),
		.device_offset = AQ_REGION_DEVICE_OFFSET,
		.device_stride = sizeof(struct aq_region_device),
		.device_count = AQ_MAX_DEVICES,
		.slot_offset = AQ_REGION_SLOT_OFFSET,
		.slot_stride = sizeof(struct aq_region_slot),
		.slot_count = AQ_SLOT_COUNT,
		.region_bytes = AQ_REGION_BYTES,
	};

	unlink(region_path);
	write_file(region_path, &header, sizeof(header), (off_t)AQ_REGION_BYTES);
}

void support_page(struct support_page *page, uint32_t devices, uint64_t memory_bytes)
{
	memset(page, 0, sizeof(*page));
	page->header = (struct aq_limits_header){
		.magic = AQ_LIMITS_MAGIC,
		.abi_major = AQ_ABI_MAJOR,
		.abi_minor = AQ_ABI_MINOR,
		.header_bytes = sizeof(struct aq_limits_header),
		.generation = 2,
		.device_stride = sizeof(struct aq_limits_device),
		.device_count = devices,
	};
	for (uint32_t i = 0; i < devices; i++) {
		memcpy(page->device[i].uuid, FIRST_UUID, sizeof(FIRST_UUID));
		page->device[i].uuid[sizeof(FIRST_UUID) - 2] = "0123456789abcdef"[i];
		page->device[i].memory_bytes = memory_bytes;
	}
	page->header.checksum = support_checksum(page);
}

/* Bit by bit, after the definition: not the code under test. */
uint32_t support_checksum(const struct support_page *page)
{
	const unsigned char *data = (const unsigned char *)page + offsetof(struct aq_limits_header, device_stride);
	size_t bytes = page->header.header_bytes + (size_t)page->header.device_count * page->header.device_stride -
		       offsetof(struct aq_limits_header, device_stride);
	uint32_t crc = ~0u;

	if (bytes > sizeof(*page) - offsetof(struct aq_limits_header, device_stride))
		return 0; /* a page that announces more than it has needs no checksum to be refused */
	for (size_t i = 0; i < bytes; i++) {
		crc ^= data[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc & 1 ? crc >> 1 ^ 0xedb88320u : crc >> 1;
	}
	return ~crc;
}

void support_write_limits(const char *path, const struct support_page *page)
{
	write_file(path, page, sizeof(*page), sizeof(*page));
}

uint32_t support_random(uint32_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}
