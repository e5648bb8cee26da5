package main

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // registers the format
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm" // registers the format
)

// dependencies of the packages, by format: Debian and Fedora name BIRD 2 differently.
var dependencies = map[string][]string{
	"deb": {"bird2 (>= 2.0.12)", "iproute2"},
	"rpm": {"bird >= 2.0.12", "iproute"},
}

// programDir has the programs under the names that all documents use. /usr/bin has links with the
// prefix vipgate-: lb and frontend are too general for every user's PATH.
const programDir = "/usr/lib/vipgate"

// writePackages writes a Debian and an RPM package of the programs of a host for each architecture.
func (r *release) writePackages() error {
	for _, arch := range r.architectures {
		contents, err := r.packageContents(arch)
		if err != nil {
			return err
		}
		for _, format := range []string{"deb", "rpm"} {
			if err := r.writePackage(format, arch, contents); err != nil {
				return fmt.Errorf("failed to write the %s package for %s: %w", format, arch, err)
			}
		}
	}
	return nil
}

// packageContents lists the files of the packages.
func (r *release) packageContents(arch string) (files.Contents, error) {
	var contents files.Contents
	add := func(source, destination, kind string, mode os.FileMode) {
		contents = append(contents, &files.Content{
			Source: source, Destination: destination, Type: kind,
			FileInfo: &files.ContentFileInfo{Mode: mode, MTime: r.time, Owner: "root", Group: "root"},
		})
	}
	for _, p := range programs {
		if p.host {
			installed := path.Join(programDir, p.name)
			add(r.binary(p.name, arch), installed, "", 0o755)
			add(installed, "/usr/bin/"+p.command(), files.TypeSymlink, 0o777)
			if p.name == "vipgate" { // as a plugin of kubectl
				add(installed, "/usr/bin/kubectl-vipgate", files.TypeSymlink, 0o777)
			}
		}
	}
	const source = "deployments/systemd"
	units, err := os.ReadDir(source)
	if err != nil {
		return nil, err
	}
	for _, unit := range units {
		file := filepath.Join(source, unit.Name())
		switch path.Ext(unit.Name()) {
		case ".service":
			add(file, "/usr/lib/systemd/system/"+unit.Name(), "", 0o644)
		case ".conf":
			add(file, "/usr/lib/sysusers.d/"+unit.Name(), "", 0o644)
		case ".env":
			add(file, "/etc/vipgate/"+unit.Name(), files.TypeConfigNoReplace, 0o644)
		}
	}
	add("cmd/vipgate/quickstart/trench.yaml", "/etc/vipgate/trench.yaml", files.TypeConfigNoReplace, 0o644)
	add("LICENSE", "/usr/share/doc/vipgate/copyright", "", 0o644)
	if r.binaries == "" {
		r.addPages(add)
	}
	return contents, nil
}

// command is the name of a program in /usr/bin.
func (p program) command() string {
	if strings.HasPrefix(p.name, "vipgate") {
		return p.name
	}
	return "vipgate-" + p.name
}

func (r *release) writePackage(format, arch string, contents files.Contents) error {
	const scripts = "deployments/systemd/scripts/"
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: "vipgate", Arch: arch, Platform: "linux", Version: packageVersion(r.version), VersionSchema: "none",
		Release: "1", Section: "net", Priority: "optional", Maintainer: "vipgate maintainers <vipgate@localhost>",
		Homepage: "https://github.com/vipgate/vipgate", License: "Apache-2.0", MTime: r.time, DisableGlobbing: true,
		Description: "Advertises virtual IPs over BGP while their targets can serve them\n" +
			"lb checks targets and forwards, frontend runs BIRD and advertises the VIPs,\n" +
			"target makes a host a target, vipgate-probe checks VIPs from beyond the gateways.\n" +
			"No unit is enabled or started by the installation.",
		Overridables: nfpm.Overridables{
			Depends: dependencies[format], Contents: contents,
			Scripts: nfpm.Scripts{
				PostInstall: scripts + "postinstall.sh", PreRemove: scripts + "preremove.sh", PostRemove: scripts + "postremove.sh",
			},
			Deb: nfpm.Deb{Compression: "zstd"},
			// The builder's name would be in the package.
			RPM: nfpm.RPM{BuildHost: "localhost", Compression: "zstd"},
		},
	})
	// The formats prepare the contents of their own copy.
	if err := nfpm.PrepareForPackager(info, format); err != nil {
		return err
	}
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	file, err := os.Create(filepath.Join(r.out, packager.ConventionalFileName(info)))
	if err != nil {
		return err
	}
	defer file.Close()
	if err := packager.Package(info, file); err != nil {
		return err
	}
	return file.Close()
}

var notVersion = regexp.MustCompile(`[^A-Za-z0-9.~]+`)

// packageVersion returns the version of a package, older than every release for a commit.
func packageVersion(version string) string {
	if tag.MatchString(version) {
		return strings.TrimPrefix(version, "v")
	}
	return "0~" + notVersion.ReplaceAllString(version, ".")
}
