// Package chromium opens pages in a headless Chromium for tests, by the DevTools protocol over
// pipes.
package chromium
