/* SPDX-License-Identifier: Apache-2.0 */
/* How large the code is that a program hands to the driver: what a module can be expected to take of a device, before its variables. */
#ifndef AQ_INTERPOSE_IMAGE_H
#define AQ_INTERPOSE_IMAGE_H

#include <stdint.h>

/* Of an image that the driver has loaded: a cubin, a fat binary or its wrapper, or text. As it lies there: compressed ones may be
 * larger. */
uint64_t aq_image_bytes(const void *image);
/* Of a file; 0 when it cannot be opened. */
uint64_t aq_image_file_bytes(const char *path);

#endif
