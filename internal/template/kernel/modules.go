package kernel

import (
	"bufio"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// wanted are the modules a guest needs, by their kernel names, in the order they
// should come up. Dependencies are added before them. What the kernel has built in
// is skipped: Debian moves drivers between built-in and module.
var wanted = []string{
	"virtio_pci", "virtio_console", "virtio_blk", "virtio_rng", "virtio_balloon",
	"libnvdimm", "nd_btt", "nd_pmem", "nd_e820", // never nfit: described as an NVDIMM the root image has no DAX
	"overlay", "virtio_net",
}

// loadOrder returns the paths of the wanted modules and their dependencies below a
// lib/modules/RELEASE folder, each after what it needs.
//
// It reads the dependencies from the modules themselves: modules.dep is made by
// depmod when the package is installed, and ours never is.
func loadOrder(dir string, wanted []string) ([]string, error) {
	files, err := moduleFiles(dir)
	if err != nil {
		return nil, err
	}
	builtin, err := builtinModules(dir)
	if err != nil {
		return nil, err
	}
	var order []string
	state := map[string]int{} // 1: being visited, 2: in order
	var visit func(name string) error
	visit = func(name string) error {
		if builtin[name] || state[name] == 2 {
			return nil
		}
		if state[name] == 1 {
			return fmt.Errorf("module %s needs itself", name)
		}
		path, ok := files[name]
		if !ok {
			return fmt.Errorf("module %s is neither in the package nor built in", name)
		}
		state[name] = 1
		deps, err := dependencies(path)
		if err != nil {
			return err
		}
		for _, d := range deps {
			if err := visit(d); err != nil {
				return fmt.Errorf("module %s: %w", name, err)
			}
		}
		state[name] = 2
		order = append(order, path)
		return nil
	}
	for _, name := range wanted {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// kernelName turns a file name into the module's name: the kernel writes "_" for "-".
func kernelName(file string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(file), ".ko"), "-", "_")
}

func moduleFiles(dir string) (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && strings.HasSuffix(path, ".ko") {
			files[kernelName(path)] = path
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	return files, nil
}

func builtinModules(dir string) (map[string]bool, error) {
	f, err := os.Open(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("list built-in modules: %w", err)
	}
	defer func() { _ = f.Close() }()
	names := map[string]bool{}
	s := bufio.NewScanner(f)
	for s.Scan() {
		names[kernelName(s.Text())] = true
	}
	return names, s.Err()
}

// dependencies reads the "depends=" entry of a module's .modinfo section.
func dependencies(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read module %s: %w", filepath.Base(path), err)
	}
	defer func() { _ = f.Close() }()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("read module %s: %w", filepath.Base(path), errors.New("no .modinfo section"))
	}
	info, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("read module %s: %w", filepath.Base(path), err)
	}
	for entry := range bytes.SplitSeq(info, []byte{0}) {
		if list, ok := bytes.CutPrefix(entry, []byte("depends=")); ok && len(list) > 0 {
			return strings.Split(strings.ReplaceAll(string(list), "-", "_"), ","), nil
		}
	}
	return nil, nil
}
