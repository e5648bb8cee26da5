package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// The part of SPDX 2.3 that is used: https://spdx.github.io/spdx-spec/v2.3/.
type (
	spdxDocument struct {
		Version       string             `json:"spdxVersion"`
		DataLicense   string             `json:"dataLicense"`
		ID            string             `json:"SPDXID"`
		Name          string             `json:"name"`
		Namespace     string             `json:"documentNamespace"`
		Creation      spdxCreation       `json:"creationInfo"`
		Packages      []spdxPackage      `json:"packages"`
		Relationships []spdxRelationship `json:"relationships"`
	}
	spdxCreation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	spdxPackage struct {
		ID               string          `json:"SPDXID"`
		Name             string          `json:"name"`
		Version          string          `json:"versionInfo"`
		DownloadLocation string          `json:"downloadLocation"`
		FilesAnalyzed    bool            `json:"filesAnalyzed"`
		References       []spdxReference `json:"externalRefs,omitempty"`
	}
	spdxReference struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	spdxRelationship struct {
		Element string `json:"spdxElementId"`
		Type    string `json:"relationshipType"`
		Related string `json:"relatedSpdxElement"`
	}
)

const document = "SPDXRef-DOCUMENT"

// writeSBOM describes the binaries with the modules that their build information
// names, and the images with BIRD with the Debian packages below it.
func (r *release) writeSBOM() error {
	name := "vipgate-" + r.version
	doc := &spdxDocument{
		Version: "SPDX-2.3", DataLicense: "CC0-1.0", ID: document, Name: name,
		Namespace: "https://github.com/vipgate/vipgate/sbom/" + name,
		Creation: spdxCreation{
			Created:  r.time.Format(time.RFC3339),
			Creators: []string{"Tool: vipgate-tools-release"},
		},
	}
	known := map[string]bool{}
	for _, program := range binaries {
		for _, arch := range r.architectures {
			file := r.binary(program, arch)
			info, err := buildinfo.ReadFile(file)
			if err != nil {
				return err
			}
			id := doc.add(known, document, "DESCRIBES", filepath.Base(file), r.version, "")
			doc.add(known, id, "CONTAINS", "stdlib", info.GoVersion,
				"pkg:golang/std@"+strings.TrimPrefix(info.GoVersion, "go"))
			for _, m := range info.Deps {
				if m.Replace != nil {
					m = m.Replace
				}
				doc.add(known, id, "CONTAINS", m.Path, m.Version, "pkg:golang/"+m.Path+"@"+m.Version)
			}
		}
	}
	for _, arch := range r.architectures {
		packages, err := os.ReadFile(filepath.Join(r.base, arch, "packages"))
		if err != nil {
			return err
		}
		id := doc.add(known, document, "DESCRIBES", "images of frontend and meridio-frontend for "+arch, r.version, "")
		for line := range strings.Lines(string(packages)) {
			name, version, ok := strings.Cut(strings.TrimSpace(line), " ")
			if !ok {
				return fmt.Errorf("list of packages for %s: %q is not a name and a version", arch, line)
			}
			doc.add(known, id, "CONTAINS", name, version, "pkg:deb/debian/"+name+"@"+version+"?arch="+arch)
		}
	}
	text, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, name+".spdx.json"), append(text, '\n'), 0o644)
}

var notID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

// add adds a package, unless the document has it, and its relationship to another
// element. It returns the package's identifier.
func (d *spdxDocument) add(known map[string]bool, of, relationship, name, version, locator string) string {
	key := locator
	if key == "" {
		key = name
	}
	id := "SPDXRef-" + strings.Trim(notID.ReplaceAllString(key, "-"), "-")
	if !known[id] {
		known[id] = true
		p := spdxPackage{ID: id, Name: name, Version: version, DownloadLocation: "NOASSERTION"}
		if locator != "" {
			p.References = []spdxReference{{"PACKAGE-MANAGER", "purl", locator}}
		}
		d.Packages = append(d.Packages, p)
	}
	d.Relationships = append(d.Relationships, spdxRelationship{of, relationship, id})
	return id
}
