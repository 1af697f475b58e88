// A Temporal server for tests: frontend, history, matching and worker in one process, on one SQLite file.
//
//	temporal-dev -port 7233 -data DIR [-namespace default]
//
// The cluster's id is kept beside the database: a server that is started again on the same data is the same cluster.
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.temporal.io/server/common/authorization"
	"go.temporal.io/server/common/cluster"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/dynamicconfig"
	tlog "go.temporal.io/server/common/log"
	"go.temporal.io/server/common/membership/static"
	"go.temporal.io/server/common/persistence/sql/sqlplugin/sqlite"
	"go.temporal.io/server/common/primitives"
	schema "go.temporal.io/server/schema/sqlite"
	"go.temporal.io/server/temporal"
)

const (
	host    = "127.0.0.1"
	name    = "active"
	store   = "sqlite"
	version = 1 // of the fail-over: one cluster, never failed over
)

func main() {
	port := flag.Int("port", 7233, "where clients and workers connect")
	data := flag.String("data", "", "folder of the database")
	namespace := flag.String("namespace", "default", "made at the first start")
	flag.Parse()
	if *data == "" {
		log.Fatal("temporal-dev: -data DIR is needed")
	}
	if err := run(*port, *data, *namespace); err != nil {
		log.Fatalf("temporal-dev: %v", err)
	}
}

func run(port int, data, namespace string) error {
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	id, err := clusterID(filepath.Join(data, "cluster"))
	if err != nil {
		return err
	}
	sql, err := database(filepath.Join(data, "temporal.db"), namespace)
	if err != nil {
		return err
	}
	ports := map[primitives.ServiceName]int{primitives.FrontendService: port}
	services := map[string]config.Service{}
	hosts := map[primitives.ServiceName]static.Hosts{}
	for _, service := range []primitives.ServiceName{
		primitives.FrontendService, primitives.HistoryService, primitives.MatchingService, primitives.WorkerService,
	} {
		at, fixed := ports[service]
		if !fixed {
			if at, err = freePort(); err != nil {
				return err
			}
		}
		services[string(service)] = config.Service{RPC: config.RPC{GRPCPort: at, BindOnIP: host}}
		hosts[service] = static.SingleLocalHost(fmt.Sprintf("%s:%d", host, at))
	}
	conf := &config.Config{
		Services: services,
		Persistence: config.Persistence{
			DefaultStore: store, VisibilityStore: store, NumHistoryShards: 1,
			DataStores: map[string]config.DataStore{store: {SQL: sql}},
		},
		ClusterMetadata: &cluster.Config{
			FailoverVersionIncrement: 10, MasterClusterName: name, CurrentClusterName: name,
			ClusterInformation: map[string]cluster.ClusterInformation{name: {
				Enabled: true, InitialFailoverVersion: version, RPCAddress: fmt.Sprintf("%s:%d", host, port), ClusterID: id,
			}},
		},
	}
	conf.Global.Membership.MaxJoinDuration = 30 * time.Second
	conf.Global.Membership.BroadcastAddress = host
	conf.DCRedirectionPolicy.Policy = "noop"
	conf.PublicClient.HostPort = fmt.Sprintf("%s:%d", host, port)
	conf.Archival.History.State = "disabled"
	conf.Archival.Visibility.State = "disabled"
	conf.NamespaceDefaults.Archival.History.State = "disabled"
	conf.NamespaceDefaults.Archival.Visibility.State = "disabled"

	logger := tlog.NewZapLogger(tlog.BuildZapLogger(tlog.Config{Stdout: true, Level: "error"}))
	claims, err := authorization.GetClaimMapperFromConfig(&conf.Global.Authorization, logger)
	if err != nil {
		return err
	}
	server, err := temporal.NewServer(
		temporal.WithConfig(conf),
		temporal.ForServices(temporal.DefaultServices),
		temporal.WithStaticHosts(hosts),
		temporal.WithLogger(logger),
		temporal.WithAuthorizer(authorization.NewNoopAuthorizer()),
		temporal.WithClaimMapper(func(*config.Config) authorization.ClaimMapper { return claims }),
		temporal.WithDynamicConfigClient(dynamicconfig.StaticClient{}),
		temporal.InterruptOn(temporal.InterruptCh()),
	)
	if err != nil {
		return err
	}
	fmt.Printf("temporal-dev: %s:%d, namespace %s, data in %s\n", host, port, namespace, data)
	return server.Start()
}

// database opens the file, and makes it with its namespace where it is new.
func database(file, namespace string) (*config.SQL, error) {
	conf := &config.SQL{
		PluginName: sqlite.PluginName, DatabaseName: file,
		ConnectAttributes: map[string]string{"mode": "rwc", "journal_mode": "wal", "synchronous": "2"},
	}
	if _, err := os.Stat(file); os.IsNotExist(err) {
		if err := schema.SetupSchema(conf); err != nil {
			return nil, fmt.Errorf("the schema: %w", err)
		}
	}
	made, err := schema.NewNamespaceConfig(name, namespace, false, nil)
	if err != nil {
		return nil, fmt.Errorf("the namespace: %w", err)
	}
	return conf, schema.CreateNamespaces(conf, made)
}

func clusterID(file string) (string, error) {
	if kept, err := os.ReadFile(file); err == nil {
		return strings.TrimSpace(string(kept)), nil
	}
	id := uuid.NewString()
	return id, os.WriteFile(file, []byte(id+"\n"), 0o600)
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", host+":0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}
