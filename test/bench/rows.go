package main

// rows is the table, in the order in which it is measured and shown.
var rows = []row{
	{1, "one VIP flips among N", measureSingleFlips},
	{2, "all VIPs flip", measureBulkFlips},
	{3, "the load balancer is lost", measureLBLoss},
	{4, "the frontend is lost", measureFrontendLoss},
	{5, "a gateway resets the session", measureReset},
	{6, "a session comes up", measureFirstFeed},
	{7, "process start → all VIPs at the gateway", measureStart},
	{8, "a gateway goes for some seconds, again and again", measureOutages},
	{9, "storms of flips", measureFlapPatterns},
	{10, "SIGTERM → exit", measureStop},
	{11, "one load balancer, many watchers", measureWatchers},
	{12, "idle: processor time and memory", measureIdle},
	{13, "packets through the frontend's namespace", measurePackets},
	{14, "targets: checked, started", measureTargets},
	{15, "a target registers", measureRegistrations},
	{17, "the data plane: changes, starts", measurePlane},
	{18, "packets through the data plane", measureForwarding},
	{19, "the data plane: what a stream takes", measureTables},
	{20, "Kubernetes: from a Pod to the trench file", measureKube},
	{21, "packets to a target and its replies", measureReplies},
}
