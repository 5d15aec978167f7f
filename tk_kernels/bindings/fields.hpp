// Reads a Python dict of named fields into a struct: a missing or an unknown name is an error, never a default.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <set>
#include <string>

namespace moe_tk::bindings {

class fields {
  public:
    fields(const pybind11::dict &values, std::string owner) : values_(values), owner_(std::move(owner)) {}

    template <class T>
    T get(const char *name) {
        seen_.insert(name);
        if (!values_.contains(name)) throw pybind11::key_error(owner_ + ": field '" + name + "' is missing");
        return values_[name].template cast<T>();
    }

    // Pointers travel as integers; 0 is a null pointer.
    template <class T>
    T *pointer(const char *name) { return reinterpret_cast<T *>(get<uintptr_t>(name)); }

    void done() const {
        for (const auto &item : values_) {
            const auto name = item.first.cast<std::string>();
            if (!seen_.count(name)) throw pybind11::key_error(owner_ + ": unknown field '" + name + "'");
        }
    }

  private:
    const pybind11::dict &values_;
    std::string owner_;
    std::set<std::string> seen_;
};

}  // namespace moe_tk::bindings
