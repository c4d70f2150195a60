/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a limits page: mapping it, and following it while it is rewritten, ends in a copy that is whole or in a reason; never in a
 * crash, a hang or a device that is not there. */
#include <string.h>
#include <unistd.h>

#include "fuzz/fuzz.h"
#include "region/limits.h"
#include "tests/support.h"

static void remove_files(void)
{
	support_remove();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	support_directory();
	atexit(remove_files);
	aq_log_set_level(AQ_LOG_ERROR);
	return 0;
}

/* A page that is valid except for the parts from the input. */
static void make_page(struct support_page *page, struct fuzz_reader *input)
{
	unsigned repairs = (unsigned)fuzz_take(input, 1);

	support_page(page, (uint32_t)fuzz_take(input, 1) % (AQ_MAX_DEVICES + 1), fuzz_take(input, 8));
	for (unsigned changes = (unsigned)fuzz_take(input, 1) % 16; changes; changes--) {
		size_t at = fuzz_take(input, 2) % (sizeof(*page) - 8);
		uint64_t value = fuzz_take(input, 8);

		memcpy((unsigned char *)page + at, &value, 1 + fuzz_take(input, 1) % 8);
	}
	if (repairs & 31) /* mostly: an odd generation is waited for, and that is all it does */
		page->header.generation &= ~(uint64_t)1;
	if (repairs & 0xfc)
		page->header.checksum = support_checksum(page);
}

static void check_copy(const struct aq_limits *limits)
{
	unsigned char uuid[16];

	CHECK(limits->device_count <= AQ_MAX_DEVICES);
	for (uint32_t i = 0; i < limits->device_count; i++) {
		CHECK(aq_uuid_parse(limits->device[i].uuid_text, uuid));
		CHECK(aq_limits_find(limits, uuid) >= 0);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_reader input = { data, bytes };
	static struct support_page page;
	struct aq_limits limits;
	struct aq_fault fault = { "" };

	make_page(&page, &input);
	support_write_limits(support_limits(), &page);
	if (fuzz_take(&input, 1) % 8 == 0)
		CHECK(truncate(support_limits(), (off_t)(fuzz_take(&input, 2) % (sizeof(page) + 1))) == 0);
	if (aq_limits_map(&limits, support_limits(), &fault)) {
		CHECK(fault.text[0]);
		aq_limits_unmap(&limits);
		return 0;
	}
	check_copy(&limits);
	for (unsigned i = 0; i < 3 && limits.bytes == sizeof(page); i++) {
		uint32_t before = limits.device_count;

		make_page(&page, &input);
		page.header.generation += 2 * (i + 1);
		support_write_limits(support_limits(), &page);
		if (aq_limits_changed(&limits))
			aq_limits_refresh(&limits);
		CHECK(limits.device_count >= before);
		check_copy(&limits);
	}
	aq_limits_unmap(&limits);
	return 0;
}
