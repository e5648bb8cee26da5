package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
)

var charts = []string{"vipgate", "vipgate-crds"}

// Media types of Helm's charts in registries.
const (
	chartConfig  = "application/vnd.cncf.helm.config.v1+json"
	chartContent = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// chartField matches a field of a Chart.yaml whose value is a plain text.
var chartField = regexp.MustCompile(`(?m)^([a-zA-Z]+): (.+)$`)

// chartMetadata returns the fields of a chart, all of which are plain texts.
func chartMetadata(name string) (map[string]string, error) {
	text, err := os.ReadFile(filepath.Join("charts", name, "Chart.yaml"))
	if err != nil {
		return nil, err
	}
	fields := map[string]string{}
	for _, match := range chartField.FindAllStringSubmatch(string(text), -1) {
		fields[match[1]] = strings.Trim(match[2], `"`)
	}
	return fields, nil
}

// checkCharts requires that the charts have the version of a tagged release.
func (r *release) checkCharts() error {
	for _, name := range charts {
		fields, err := chartMetadata(name)
		if err != nil {
			return err
		}
		if tag.MatchString(r.version) && (fields["appVersion"] != r.version || "v"+fields["version"] != r.version) {
			return fmt.Errorf("charts/%s/Chart.yaml has version %s and appVersion %s, not those of %s: edit and commit it",
				name, fields["version"], fields["appVersion"], r.version)
		}
	}
	return nil
}

// writeCharts writes each chart as helm package does, and as an OCI archive. From a registry, helm
// install oci://… takes it.
func (r *release) writeCharts() error {
	for _, name := range charts {
		fields, err := chartMetadata(name)
		if err != nil {
			return err
		}
		content, err := r.chartArchive(name)
		if err != nil {
			return fmt.Errorf("failed to pack the chart %s: %w", name, err)
		}
		version := fields["version"]
		file := filepath.Join(r.out, fmt.Sprintf("%s-%s.tgz", name, version))
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return err
		}
		config, err := json.Marshal(fields)
		if err != nil {
			return err
		}
		image, err := newArtifact(chartConfig, config, chartContent, content, nil)
		if err != nil {
			return err
		}
		index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Annotations: refName(version)},
		})
		archive := filepath.Join(r.out, fmt.Sprintf("chart-%s_%s.oci.tar", name, version))
		if err := r.writeArchive(index, archive); err != nil {
			return fmt.Errorf("failed to write %s: %w", archive, err)
		}
	}
	return nil
}

// chartArchive returns the files of a chart in a directory with its name.
func (r *release) chartArchive(name string) ([]byte, error) {
	return compressedTar(func(w *tar.Writer) error { return addTree(w, filepath.Join("charts", name), name+"/", r.time) })
}

func compressedTar(write func(*tar.Writer) error) ([]byte, error) {
	var data bytes.Buffer
	compressed := gzip.NewWriter(&data)
	w := tar.NewWriter(compressed)
	if err := write(w); err != nil {
		return nil, err
	}
	if err := errors.Join(w.Close(), compressed.Close()); err != nil {
		return nil, err
	}
	return data.Bytes(), nil
}
