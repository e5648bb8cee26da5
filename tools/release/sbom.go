package main

import (
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// sbom collects the packages of an SPDX document.
type sbom struct {
	*spdx.Document
	known map[common.ElementID]bool
}

// writeSBOM describes the binaries with the modules that their build information
// names, and the images with BIRD with the Debian packages below it. Generators such as syft write
// a random namespace and the time of the run, and two runs must write the same bytes.
func (r *release) writeSBOM() error {
	name := "vipgate-" + r.version
	document := sbom{known: map[common.ElementID]bool{}, Document: &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT", DocumentName: name,
		DocumentNamespace: "https://github.com/vipgate/vipgate/sbom/" + name,
		CreationInfo: &spdx.CreationInfo{
			Created:  r.time.Format(time.RFC3339),
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "vipgate-tools-release"}},
		},
	}}
	for _, p := range programs {
		for _, arch := range r.architectures {
			file := r.binary(p.name, arch)
			info, err := buildinfo.ReadFile(file)
			if err != nil {
				return err
			}
			id := document.add("DOCUMENT", common.TypeRelationshipDescribe, filepath.Base(file), r.version, "")
			document.add(id, common.TypeRelationshipContains, "stdlib", info.GoVersion,
				"pkg:golang/std@"+strings.TrimPrefix(info.GoVersion, "go"))
			for _, module := range info.Deps {
				if module.Replace != nil {
					module = module.Replace
				}
				document.add(id, common.TypeRelationshipContains, module.Path, module.Version,
					"pkg:golang/"+module.Path+"@"+module.Version)
			}
		}
	}
	for _, arch := range r.architectures {
		packages, err := os.ReadFile(filepath.Join(r.base, arch, "packages"))
		if err != nil {
			return err
		}
		id := document.add("DOCUMENT", common.TypeRelationshipDescribe,
			"images of frontend and meridio-frontend for "+arch, r.version, "")
		for line := range strings.Lines(string(packages)) {
			name, version, ok := strings.Cut(strings.TrimSpace(line), " ")
			if !ok {
				return fmt.Errorf("list of packages for %s: %q is not a name and a version", arch, line)
			}
			document.add(id, common.TypeRelationshipContains, name, version,
				"pkg:deb/debian/"+name+"@"+version+"?arch="+arch)
		}
	}
	file, err := os.Create(filepath.Join(r.out, name+".spdx.json"))
	if err != nil {
		return err
	}
	defer file.Close()
	if err := spdxjson.Write(document.Document, file, spdxjson.Indent("  "), spdxjson.EscapeHTML(false)); err != nil {
		return fmt.Errorf("failed to write the SBOM: %w", err)
	}
	return file.Close()
}

var notID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

// add adds a package, unless the document has it, and its relationship to another
// element. It returns the package's identifier.
func (s sbom) add(to common.ElementID, relationship, name, version, locator string) common.ElementID {
	key := locator
	if key == "" {
		key = name
	}
	id := common.ElementID(strings.Trim(notID.ReplaceAllString(key, "-"), "-"))
	if !s.known[id] {
		s.known[id] = true
		added := &spdx.Package{
			PackageSPDXIdentifier: id, PackageName: name, PackageVersion: version, PackageDownloadLocation: "NOASSERTION",
		}
		if locator != "" {
			added.PackageExternalReferences = []*spdx.PackageExternalReference{{
				Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: locator,
			}}
		}
		s.Packages = append(s.Packages, added)
	}
	s.Relationships = append(s.Relationships, &spdx.Relationship{
		RefA: common.MakeDocElementID("", string(to)), RefB: common.MakeDocElementID("", string(id)),
		Relationship: relationship,
	})
	return id
}
