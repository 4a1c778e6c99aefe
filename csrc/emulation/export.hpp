// How the emulated libraries mark what they export.
#ifndef EMULATION_EXPORT_HPP
#define EMULATION_EXPORT_HPP

// The only macro: there is no other way to give a name to an attribute. All else is hidden,
// since both libraries have parts of the same names.
#define EMULATION_API extern "C" __attribute__((visibility("default")))

#endif  // EMULATION_EXPORT_HPP
