/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a usage region: attaching, reaping and repairing end in a slot or in a reason; never in a crash, a hang or an access
 * outside of the file. */
#include <string.h>
#include <unistd.h>

#include "fuzz/fuzz.h"
#include "region/region.h"
#include "tests/support.h"

static void remove_files(void)
{
	support_remove();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	support_directory();
	support_write_limits(support_limits(), &(struct support_page){ 0 });
	atexit(remove_files);
	return 0;
}

/* Header words are hit as often as all the rest together. */
static size_t place(struct fuzz_reader *input)
{
	return fuzz_take(input, 1) % 2 ? fuzz_take(input, 1) % sizeof(struct aq_region_header) & ~(size_t)3
				       : fuzz_take(input, 4) % (AQ_REGION_BYTES - 8);
}

static void write_region(struct fuzz_reader *input)
{
	support_write_region();
	FILE *file = fopen(support_region(), "r+b");
	CHECK(file);
	for (unsigned changes = (unsigned)fuzz_take(input, 1) % 24; changes; changes--) {
		CHECK(fseek(file, (long)place(input), SEEK_SET) == 0);
		uint64_t value = fuzz_take(input, 8);
		CHECK(fwrite(&value, 1, 1 + fuzz_take(input, 1) % 8, file) > 0);
	}
	CHECK(fclose(file) == 0);
	if (fuzz_take(input, 1) % 8 == 0)
		CHECK(truncate(support_region(), (off_t)(fuzz_take(input, 4) % (2 * AQ_REGION_BYTES))) == 0);
}

static void use(struct aq_region *region)
{
	for (uint32_t device = 0; device < AQ_MAX_DEVICES; device++) {
		CHECK((unsigned char *)(aq_region_line(region, device) + 1) <= region->base + region->bytes);
		CHECK((unsigned char *)(aq_region_mine(region, device) + 1) <= region->base + region->bytes);
		aq_slot_used_bytes(aq_region_mine(region, device));
	}
	aq_region_reclaim(region);
	aq_region_reclaim(region);
	for (uint32_t i = 0; i < region->slot_count; i++)
		aq_region_is_live(region, i);
	CHECK(aq_region_is_live(region, (uint32_t)region->slot_index));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_reader input = { data, bytes };
	struct aq_fault fault = { "" };
	struct aq_region region;

	write_region(&input);
	if (aq_region_map(&region, support_region(), AQ_REGION_WRITE, &fault))
		CHECK(fault.text[0]);
	else if (aq_region_take_slot(&region, &fault))
		CHECK(fault.text[0]);
	else
		use(&region);
	aq_region_unmap(&region);
	return 0;
}
