package main

// rows is the table, in the order in which it is measured and shown.
var rows = []row{}
