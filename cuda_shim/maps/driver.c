/* SPDX-License-Identifier: Apache-2.0 */
/* Nothing: the linker only reads the name of the library made from this. */
